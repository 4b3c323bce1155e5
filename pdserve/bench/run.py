"""Carries a benchmark out: for each load and repeat a warm-up, a snapshot, the client, a snapshot, a verdict."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from pdserve.bench.clients import ClientRun, LoadClient
from pdserve.bench.figures import RequestRecord, UnreadableResultError, figures
from pdserve.bench.result import EVENTS, RESULT, BenchResult, Measurement, Window, provenance
from pdserve.bench.snapshot import CounterReader, Sampler, clocks, cpu_use, plan_digest, proxy_pids
from pdserve.bench.validity import Evidence, judge
from pdserve.bench.workload import Load, RequestTrace, Workload, asked_input, facts, prefix_hit
from pdserve.errors import PreflightError
from pdserve.logs.lines import end_of, split
from pdserve.observe.remote_http import client as http_client
from pdserve.observe.remote_http import seen_from_here
from pdserve.plan.model import Plan
from pdserve.run.directory import LOST, RunDir, record_errors
from pdserve.run.state import DeploymentState
from pdserve.system.process import Child, marker, new_token, spawn
from pdserve.time_limit import time_limit

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
    planned: Mapping[str, str] = field(default_factory=dict)
    """What the planner has computed of it."""


@dataclass(frozen=True)
class Task:
    """Names what is measured."""

    workload: Workload
    loads: tuple[Load, ...]
    client: LoadClient
    limit_seconds: float
    """For each run of the client."""
    trace: RequestTrace | None = None
    """The trace of the workload."""


async def bench(serving: ServingDeployment, task: Task, folder: Path, on_measurement: OnMeasurement) -> BenchResult:
    """Carry out a benchmark. Its result is in `folder`, written after each measurement anew. Raises PreflightError when
    the client cannot be started, and StateError when the deployment's record is gone."""
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
        self._looker = CounterReader(serving.run, seen_from_here(serving.plan, serving.state), http)

    async def all(self) -> BenchResult:
        with record_errors(self._serving.run):
            self._folder.mkdir(parents=True, mode=0o700)
        client, trace = self._task.client, self._task.trace
        about = await asyncio.to_thread(
            provenance, self._serving.run, self._serving.plan, client, self._serving.planned
        )
        of_trace = None if trace is None else facts(trace)
        result = BenchResult(provenance=about, workload=self._task.workload, trace=of_trace, measurements=())
        for load in self._task.loads:
            for repeat in range(self._task.workload.repeats):
                measurement = await self._measure(load, repeat)
                result = result.model_copy(update={"measurements": (*result.measurements, measurement)})
                with record_errors(self._serving.run):
                    self._serving.run.write(self._folder / RESULT, result.model_dump_json(indent=1))
                    self._keep_events()
                self._on_measurement(measurement)
                if measurement.after.phase in _OVER:
                    return result  # there is nothing left to measure
        return result

    def _keep_events(self) -> None:
        """Keep the history so far: the run may be removed, or cut what was before. Raises OSError."""
        events, _ = self._serving.run.read_events()
        self._serving.run.write(self._folder / EVENTS, "".join(f"{json.dumps(event)}\n" for event in events))

    async def _measure(self, load: Load, repeat: int) -> Measurement:
        name = f"{load.title.replace(' ', '-').replace('/', '-per-')}.{repeat}"
        workload, plan = self._task.workload, self._serving.plan
        warm: _Ran | None = None
        if workload.warmup:
            few = load.model_copy(update={"requests": workload.warmup})
            warm = await self._run_client(few, f"{name}.warmup", warmup=True)
        before = await self._looker.settled()
        _, offset = self._serving.run.read_events()
        ran = await self._run_client(load, name)
        after = await self._looker.settled()
        events, _ = self._serving.run.read_events(offset)
        client_cpu, proxy_cpu = cpu_use(ran.sampler.samples, ran.records, ran.sampler.titled(self._task.client.timing))
        evidence = Evidence(
            plan=plan,
            workload=workload,
            load=load,
            records=ran.records,
            before=before,
            after=after,
            run_id=self._serving.run.run_id,
            plan_digest=plan_digest(plan),
            events=events,
            client=client_cpu,
            client_problem=ran.problem,
            warmup=None if warm is None else warm.records,
            warmup_problem="" if warm is None else warm.problem,
            asked_input=None if self._task.trace is None else asked_input(self._task.trace),
            theory=0.0 if self._task.trace is None else prefix_hit(self._task.trace, answers=True),
        )
        return Measurement(
            load=load,
            repeat=repeat,
            verdict=judge(evidence),
            figures=figures(ran.records, gpus=gpus(plan), slo=workload.slo, load_seconds=load.seconds),
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
            raw=ran.asked.result.name,
            log=ran.asked.log.name,
        )

    async def _run_client(self, load: Load, name: str, *, warmup: bool = False) -> _Ran:
        """Run the client to its end, or to the limit."""
        workload = self._task.workload
        asked = ClientRun(
            plan=self._serving.plan,
            workload=workload,
            load=load,
            salt=f"pdserve-bench-{self._folder.name}-{name}",
            seed=workload.seed + (_WARMUP_SEED if warmup else 0),
            folder=self._folder,
            name=name,
            warmup=warmup,
        )
        try:
            return await self._ran(asked)
        finally:
            self._task.client.clean(asked)

    async def _ran(self, asked: ClientRun) -> _Ran:
        client = self._task.client
        with record_errors(self._serving.run):
            argv = client.prepare(asked)
        env = client.environment(asked, os.environ, self._serving.key)
        before = clocks()
        try:
            # A name of its own: the client is no process of the deployment.
            ours = marker(f"bench-{self._folder.name}", new_token(), "client.1")
            child = spawn(argv, env=env, log=asked.log, marker=ours, control_stdin=False)
        except OSError as error:
            raise PreflightError(
                f"the client cannot be started: {error.strerror or error}",
                where=client.program,
                cause="the engines run in another place (a container, another machine) or their environment has moved",
                todo=f"--python /path/to/python of an environment on this machine that has {client.name}",
            ) from error
        sampler = Sampler(child.pid, proxy_pids(asked.plan, self._serving.state), self._looker)
        problem = await self._ended(child, sampler)
        records: tuple[RequestRecord, ...] = ()
        try:
            # One that failed may have left records all the same: they have the errors of the requests.
            records = await asyncio.to_thread(client.records, asked, before)
        except (OSError, UnreadableResultError) as error:
            problem = problem or f"{client.name} left no result that can be read ({error})"
        if problem:
            lines = [line for line in split(end_of(asked.log, _LOG_BYTES)) if any(map(str.isalnum, line))]
            end = " | ".join(lines[-_LOG_LINES:])
            problem = f"{problem}; the end of {asked.log}: {end}"
        return _Ran(asked, records, sampler, problem)

    async def _ended(self, child: Child, sampler: Sampler) -> str:
        """Wait for the client and return what went wrong, if anything did."""
        sampling = asyncio.create_task(sampler.run())
        try:
            async with time_limit(self._task.limit_seconds):
                how = await child.wait()
            return "" if how.code == 0 else f"{self._task.client.name} {how}"
        except TimeoutError:
            return f"{self._task.client.name} was stopped after {self._task.limit_seconds:g} s (--limit)"
        finally:
            sampling.cancel()
            try:
                await asyncio.wait({sampling})  # awaited itself, it would take a Ctrl-C of this moment for its own end
            finally:
                await child.stop(_STOP_SECONDS)
            if not sampling.cancelled():
                sampling.result()


@dataclass(frozen=True)
class _Ran:
    """A run of the client."""

    asked: ClientRun
    records: tuple[RequestRecord, ...]
    sampler: Sampler
    problem: str


def gpus(plan: Plan) -> int:
    """Return the devices of all engines, prefill and decode together; 0 on a CPU."""
    return sum(len(process.devices) for process in plan.processes if process.is_engine)
