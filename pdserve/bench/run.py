"""Carries a benchmark out: for each load and repeat a warm-up, a reading, the client, a reading, a verdict."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

from pdserve.bench.client import NAME, BenchClient
from pdserve.bench.evidence import Evidence
from pdserve.bench.figures import figures
from pdserve.bench.look import Looker
from pdserve.bench.provenance import provenance
from pdserve.bench.records import RequestRecord, UnreadableResultError, of_vllm
from pdserve.bench.result import BenchResult, Measurement, Window
from pdserve.bench.sampling import Sampler, cpu_use, proxy_pids
from pdserve.bench.stored import EVENTS, RESULT
from pdserve.bench.validity import judge
from pdserve.bench.workload import Load, Workload
from pdserve.errors import PreflightError
from pdserve.logs.lines import end_of, split
from pdserve.observe.remote_http import client as http_client
from pdserve.observe.remote_http import seen_from_here
from pdserve.plan.model import Plan
from pdserve.run.directory import RunDir
from pdserve.run.presence import LOST
from pdserve.run.state import DeploymentState
from pdserve.run.written import written
from pdserve.system.markers import marker, new_token
from pdserve.system.process import Child, spawn

_STOP_SECONDS = 5.0
_OVER = ("stopped", "failed", "draining", LOST)
_WARMUP_SEED = 1_000_003
"""Added to the seed: prompts of a warm-up are never those of the measurement."""
_LOG_LINES, _LOG_BYTES = 5, 4096

OnMeasurement = Callable[[Measurement], None]


@dataclass(frozen=True)
class ServingDeployment:
    """A deployment that serves, as its record has it."""

    run: RunDir
    state: DeploymentState
    plan: Plan
    key: str


@dataclass(frozen=True)
class Task:
    """What is measured."""

    workload: Workload
    loads: tuple[Load, ...]
    client: BenchClient
    limit_seconds: float
    """For each run of the client."""


async def bench(serving: ServingDeployment, task: Task, folder: Path, on_measurement: OnMeasurement) -> BenchResult:
    """Leaves its result in `folder`, after each measurement anew. Raises PreflightError when the client cannot be
    started, and StateError when the deployment's record is gone."""
    async with http_client(serving.run, serving.state) as http:
        return await _Bench(serving, task, folder, http, on_measurement).all()


class _Bench:
    def __init__(
        self,
        serving: ServingDeployment,
        task: Task,
        folder: Path,
        http: httpx.AsyncClient,
        on_measurement: OnMeasurement,
    ) -> None:
        self._serving = serving
        self._task = task
        self._folder = folder
        self._on_measurement = on_measurement
        self._looker = Looker(serving.run, seen_from_here(serving.plan, serving.state), http)

    async def all(self) -> BenchResult:
        with written(self._serving.run):
            self._folder.mkdir(parents=True, mode=0o700)
        about = await asyncio.to_thread(provenance, self._serving.run, self._serving.plan)
        result = BenchResult(provenance=about, workload=self._task.workload, measurements=())
        for load in self._task.loads:
            for repeat in range(self._task.workload.repeats):
                measurement = await self._measure(load, repeat)
                result = result.model_copy(update={"measurements": (*result.measurements, measurement)})
                with written(self._serving.run):
                    self._serving.run.write(self._folder / RESULT, result.model_dump_json(indent=1))
                    self._keep_events()
                self._on_measurement(measurement)
                if measurement.after.phase in _OVER:
                    return result  # there is nothing left to measure
        return result

    def _keep_events(self) -> None:
        """The history so far: the run may be removed, or cut what was before. Raises OSError."""
        events, _ = self._serving.run.read_events()
        self._serving.run.write(self._folder / EVENTS, "".join(f"{json.dumps(event)}\n" for event in events))

    async def _measure(self, load: Load, repeat: int) -> Measurement:
        name = f"{load.title.replace(' ', '-').replace('/', '-per-')}.{repeat}"
        workload, plan = self._task.workload, self._serving.plan
        if workload.warmup:
            few = load.model_copy(update={"requests": workload.warmup})
            await self._run_client(few, f"{name}.warmup", seed=workload.seed + _WARMUP_SEED)
        before = await self._looker.settled()
        _, offset = self._serving.run.read_events()
        ran = await self._run_client(load, name, seed=workload.seed)
        after = await self._looker.settled()
        events, _ = self._serving.run.read_events(offset)
        client_cpu, proxy_cpu = cpu_use(ran.sampler.samples, ran.records)
        evidence = Evidence(
            plan=plan,
            workload=workload,
            load=load,
            records=ran.records,
            before=before,
            after=after,
            events=events,
            client=client_cpu,
            client_problem=ran.problem,
        )
        return Measurement(
            load=load,
            repeat=repeat,
            verdict=judge(evidence),
            figures=figures(ran.records, gpus=gpus(plan), slo=workload.slo),
            window=Window(
                prefill=evidence.engines("prefill", "aggregated"),
                decode=evidence.engines("decode"),
                lmcache=evidence.caches(),
                proxy=evidence.proxy(),
                peaks=ran.sampler.peaks,
                client_cpu=client_cpu,
                proxy_cpu=proxy_cpu,
            ),
            before=before,
            after=after,
            raw=f"{name}.json",
            log=f"{name}.log",
        )

    async def _run_client(self, load: Load, name: str, *, seed: int) -> _Ran:
        """To its end, or to the limit."""
        plan, client = self._serving.plan, self._task.client
        raw, log = self._folder / f"{name}.json", self._folder / f"{name}.log"
        salt = f"pdserve-bench-{self._folder.name}-{name}"
        argv = client.argv(plan, self._task.workload, load, salt=salt, seed=seed, result=raw)
        env = client.environment(os.environ, plan, self._serving.key)
        try:
            # A name of its own: the client is no process of the deployment.
            ours = marker(f"bench-{self._folder.name}", new_token(), "client.1")
            child = spawn(argv, env=env, log=log, marker=ours, control_stdin=False)
        except OSError as error:
            raise PreflightError(
                f"the client cannot be started: {error.strerror or error}",
                where=client.python,
                cause="the engines run in another place (a container, another machine) or their environment has moved",
                todo="--python /path/to/python of an environment on this machine that has vLLM",
            ) from error
        sampler = Sampler(child.pid, proxy_pids(plan, self._serving.state), self._looker)
        problem = await self._ended(child, sampler)
        records: tuple[RequestRecord, ...] = ()
        if not problem:
            try:
                records = of_vllm(raw.read_text(encoding="utf-8"))
            except (OSError, UnreadableResultError) as error:
                problem = f"{NAME} left no result that can be read ({error})"
        if problem:
            problem = f"{problem}; the end of {log}: {' | '.join(split(end_of(log, _LOG_BYTES))[-_LOG_LINES:])}"
        return _Ran(records, sampler, problem)

    async def _ended(self, child: Child, sampler: Sampler) -> str:
        """What went wrong, if anything did."""
        sampling = asyncio.create_task(sampler.run())
        try:
            async with asyncio.timeout(self._task.limit_seconds):
                how = await child.wait()
            return "" if how.code == 0 else f"{NAME} {how}"
        except TimeoutError:
            return f"{NAME} was stopped after {self._task.limit_seconds:g} s (--limit)"
        finally:
            sampling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sampling
            await child.stop(_STOP_SECONDS)


@dataclass(frozen=True)
class _Ran:
    """A run of the client."""

    records: tuple[RequestRecord, ...]
    sampler: Sampler
    problem: str


def gpus(plan: Plan) -> int:
    """Devices of all engines, prefill and decode together; 0 on a CPU."""
    return sum(len(process.devices) for process in plan.processes if process.is_engine)
