"""Proves a deployment before it is ready, and one of its instances before it is back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypedDict

from pdserve.errors import StartError
from pdserve.launch.bad_peers import Outcome
from pdserve.launch.canary import PairCanaries, one_token
from pdserve.launch.failure import not_attached
from pdserve.launch.fleet import OTHER_GENERATION, Fleet
from pdserve.launch.instance_routing import InstanceRouting
from pdserve.lmcache_server import wait_attached
from pdserve.logs.lines import GrowingLog, message
from pdserve.plan.model import LmcacheServer, Plan
from pdserve.plan.preparation import WEIGHTS_RECORDS
from pdserve.plan.process import HttpProbe, Process
from pdserve.preflight.reachability import CrossNodePort, side_channels
from pdserve.recipe.effective import SPECULATIVE
from pdserve.run.directory import RunDir
from pdserve.run.patch_proof import find_unpatched_engine, records

_REACH_SECONDS = 3.0
_PAIRS_AT_ONCE = 4


class StartProofs:
    """Proves one deployment, again whenever something was started. A proof raises StartError, or is in the history."""

    def __init__(self, fleet: Fleet, *, engine_key: str) -> None:
        self._fleet, self._engine_key = fleet, engine_key

    def patches_active(self, names: Iterable[str]) -> None:
        """Prove that every process has the patches that it needs."""
        if (error := find_unpatched_engine(self._fleet.plan, self._fleet.run, names)) is not None:
            raise error
        reports = {name: records(self._fleet.run, name) for name in self._fleet.plan.names()}
        active = {
            name: sorted({patch for record in reported for patch in record.active})
            for name, reported in reports.items()
        }
        if applied := {name: patches for name, patches in active.items() if patches}:
            self._fleet.record("patched", processes=applied)

    async def same_weights(self) -> None:
        """Prove that all nodes have the same commit of the model."""
        self._fleet.record("weights", commit=await same_commit(self._fleet.plan, self._fleet.run))

    async def attached(self) -> None:
        """Prove that every LMCache server has the engine workers that the plan expects."""
        servers = self._fleet.plan.lmcache
        if not servers:
            return
        attachments = await wait_attached(
            servers, self._fleet.on_node_of, seconds=self._fleet.plan.timeouts.attach_seconds
        )
        if missing := [attachment for attachment in attachments if not attachment.complete]:
            raise not_attached(missing, self._fleet.plan, self._fleet.run)
        if (error := without_kernels(self._fleet.plan, self._fleet.run)) is not None:
            raise error
        self._fleet.record("attached", servers={attachment.server: attachment.registered for attachment in attachments})

    async def reached(self) -> None:
        """Prove that decodes on other nodes reach Mooncake's side channels. It chooses their ports itself, so that this
        can be tried only now."""
        plan = self._fleet.plan
        asked = [worker for worker in plan.proxy.workers if worker.bootstrap_url is not None]
        if len({process.node for process in plan.processes if process.probe is not None}) < 2 or not asked:
            return
        targets: list[CrossNodePort] = []
        for worker in asked:
            ask = self._fleet.on_node_of(worker.name)
            answer = await ask("GET", f"{worker.bootstrap_url}/query", seconds=_REACH_SECONDS)
            with contextlib.suppress(ValueError):  # a raw connector may answer with something else there
                targets += side_channels(plan, worker.name, answer.body)
        answers = await asyncio.gather(*(self._reaches(target) for target in targets))
        if bad := [text for text in answers if text is not None]:
            raise StartError(
                f"{len(bad)} of {len(targets)} KV side channels cannot be reached from the node that needs them",
                where=bad[0].partition(":")[0],
                cause="a firewall between the nodes, or an address of another network",
                todo="open all TCP ports between the nodes (these are random), or choose the network (network.cidr)",
                evidence=tuple(bad),
            )
        if targets:
            self._fleet.record("reached", side_channels=len(targets))

    async def _reaches(self, target: CrossNodePort) -> str | None:
        """Try whether a port of another node is reached, and say what is wrong; None: it is."""
        link = self._fleet.links.get(target.source)
        if link is None:
            return f"{target.source}: its agent is gone"
        url = f"tcp://{target.address}:{target.port}"
        answer = await link.ask("CONNECT", url, seconds=_REACH_SECONDS)
        return None if answer.status == 200 else f"{target.source}: {target.node} at {url}: {answer.error}"

    async def canary(self) -> float:
        """Send one token through the proxy, and return the seconds that it took."""
        plan = self._fleet.plan
        url = plan.proxy_url
        canary = await one_token(
            self._fleet.on_node_of("proxy"),
            url,
            plan.proxy.served_name,
            seconds=plan.canary_seconds,
            key=self._engine_key if plan.proxy_kind == "pdserve" else None,
        )
        self._fleet.record("canary", name="proxy", ok=canary.ok, seconds=round(canary.seconds, 3), text=canary.text)
        if not canary.ok:
            raise StartError(
                f"one token through the proxy did not come back: {canary.text}",
                where=url,
                cause="every process is healthy by itself, but a request does not get through all of them",
                todo=f"read the logs of the proxy and of both roles in {self._fleet.run.logs}",
            )
        self._fleet.state.endpoint = url
        return canary.seconds


class InstanceProofs:
    """Proves one engine instance that was started again or has lost its cache server."""

    def __init__(self, fleet: Fleet, instances: InstanceRouting, *, engine_key: str) -> None:
        self._fleet, self._instances, self._engine_key = fleet, instances, engine_key
        self._pairs = PairCanaries(fleet, engine_key=engine_key)

    def has_patches(self, name: str) -> bool:
        """Tell whether every process of an instance has the patches that it needs; what is lacking is in the
        history."""
        names = [process.name for process in self._fleet.plan.instance_of(name)]
        error = find_unpatched_engine(self._fleet.plan, self._fleet.run, names)
        if error is not None:
            self._fleet.record("failed", error=error.render(), exit_code=error.exit_code, name=name)
        return error is None

    async def attached(self, name: str, servers: Sequence[LmcacheServer]) -> bool:
        """Tell whether every one of these servers has the workers of its engines that live: with a dead one beside them
        it can never be complete. In the end those of engines that answer are enough: a process that is stopped does not
        register. `name`: the engine that is to be proven."""

        def of_living(server: LmcacheServer) -> int:
            return self._workers(server, self._instances.serves)

        def answers(engine: str) -> bool:
            return engine == name or (self._instances.serves(engine) and not self._fleet.silent(engine))

        attachments = await wait_attached(
            servers, self._fleet.on_node_of, seconds=self._fleet.plan.timeouts.attach_seconds, expected=of_living
        )
        return all(
            replace(attachment, expected=self._workers(server, answers)).complete
            for attachment, server in zip(attachments, servers, strict=True)
        )

    @staticmethod
    def _workers(server: LmcacheServer, counts: Callable[[str], bool]) -> int:
        """Count the workers of the engines that count."""
        return sum(workers for engine, workers in server.workers_of.items() if counts(engine))

    async def all_answer(self, name: str) -> bool:
        """Tell whether each API server of an instance has answered a canary."""
        return all(await asyncio.gather(*map(self.answers, self._instances.servers(name))))

    async def answers(self, name: str) -> bool:
        """Tell whether an API server has answered a canary, with a token of its own."""
        probe = self._fleet.plan.process(name).probe
        if not isinstance(probe, HttpProbe):
            return True
        canary = await one_token(
            self._fleet.on_node_of(name),
            f"http://{probe.host}:{probe.port}",
            self._fleet.plan.served_name,
            seconds=self._fleet.plan.timeouts.canary_seconds,
            key=self._engine_key,
        )
        self._fleet.record("canary", name=name, ok=canary.ok, seconds=round(canary.seconds, 3), text=canary.text)
        return canary.ok

    async def crosses(self, name: str) -> dict[str, Outcome]:
        """Send a canary between an instance, which is not routed to yet, and each of the other role that serves, with
        those that begin to meanwhile. Returns the outcomes by the name of the peer; empty where there is none, or no
        proxy that can send one."""
        until = time.monotonic() + self._fleet.plan.timeouts.canary_seconds
        # One after the other through the same decode, whose counters are the proof.
        few = asyncio.Semaphore(1 if self._fleet.plan.process(name).role == "decode" else _PAIRS_AT_ONCE)
        outcomes: dict[str, Outcome] = {}

        async def cross(peer: str) -> None:
            async with few:
                outcomes[peer] = await self._cross(name, peer, until)

        while peers := [peer for peer in self._peers(name) if peer not in outcomes]:
            await asyncio.gather(*map(cross, peers))
        return outcomes

    def _peers(self, name: str) -> list[str]:
        """Return the instances of the other role to which the proxy routes, or will as soon as to this one."""
        plan = self._fleet.plan
        if plan.proxy_kind != "pdserve" or plan.mode == "aggregated" or not self._instances.serves("proxy"):
            return []
        role = plan.process(name).role
        leaders = dict.fromkeys(plan.instance_of(p.name)[0].name for p in plan.processes if p.is_engine)
        others = (leader for leader in leaders if plan.process(leader).role != role)
        is_met = self._waits_with if self._is_other_generation(name) else self._is_routed
        return [other for other in others if all(map(is_met, self._instances.servers(other)))]

    def _is_routed(self, server: str) -> bool:
        return self._fleet.phase_of(server) == "ready"

    def _is_other_generation(self, name: str) -> bool:
        return OTHER_GENERATION in self._fleet.held.get(name, ())

    def _waits_with(self, server: str) -> bool:
        """Tell whether a server is proven, and held for its generation alone."""
        return self._fleet.phase_of(server) == "degraded" and self._fleet.held.get(server) == {OTHER_GENERATION}

    async def _cross(self, name: str, peer: str, until: float) -> Outcome:
        """Send canaries between two instances, so that every API server of both takes part in one at least. The worst
        outcome is that of the pair."""
        mine, theirs = self._instances.servers(name), self._instances.servers(peer)
        decodes = self._fleet.plan.process(name).role == "decode"
        outcomes: list[Outcome] = []
        for index in range(max(len(mine), len(theirs))):
            new, other = mine[index % len(mine)], theirs[index % len(theirs)]
            prefill, decode = (other, new) if decodes else (new, other)
            outcomes.append(await self._pairs.cross(prefill, decode, new=new, seconds=until - time.monotonic()))
        if not all(self._is_routed(server) or self._waits_with(server) for server in theirs):
            return "unknown"
        return "failed" if "failed" in outcomes else "crossed" if "crossed" in outcomes else "unknown"


_WARNING = re.compile(
    r"lmcache\.(?:cuda_ops|c_ops) compiled extension not found"  # 0.5.3 and later
    r"|Failed to import backend lmcache\.c_ops"  # 0.4.6 to 0.5.2
    r"|Fallback to python backend lmcache\."  # until 0.4.5
)


def without_kernels(plan: Plan, run: RunDir) -> StartError | None:
    """Return the error of the first LMCache server, or engine that uses one, whose log warns of missing kernels.

    On ROCm LMCache goes on without them, and its Python copies between host and device are not in the order of the
    device's stream, so that KV may be wrong (lmcache#4870). On other platforms the same words are harmless."""
    if plan.platform != "rocm":
        return None
    for process in _lmcache_processes(plan):
        if (line := _warning_of(run, process)) is not None:
            return StartError(
                "LMCache runs without its compiled kernels, and its Python copies may store wrong KV on ROCm",
                where=f"{process.name}@{process.node}",
                cause="the installed LMCache is not a ROCm build, or its kernels do not load there (lmcache#4870)",
                todo="install a -rocm wheel of LMCache's releases, or build it with BUILD_WITH_HIP=1",
                evidence=(f"log: {run.path / process.log}", line),
            )
    return None


def _lmcache_processes(plan: Plan) -> Iterator[Process]:
    for process in plan.processes:
        if process.is_lmcache or process.lmcache:
            yield process


def _warning_of(run: RunDir, process: Process) -> str | None:
    log = GrowingLog(run.path / process.log, 0)
    while True:
        for line in map(message, log.step()):
            if _WARNING.search(line):
                return line
        if not log.behind:
            return None


class DownloadRecord(TypedDict):
    """The model and the commit that a download has fetched, as it leaves them in the run directory."""

    model: str
    revision: str
    commit: str


_LOOK_SECONDS = 0.5
_PATIENCE_SECONDS = 60.0
"""A network file system may show a file of another node so much later."""


async def same_commit(plan: Plan, run: RunDir) -> str | None:
    """Return the commit of the model on all nodes; None where it is not fetched. Raises StartError when nodes differ in
    it, or in the model that writes drafts."""
    fetched = [(process, await _record(run, process)) for process in plan.processes if process.fetches_weights]
    own: str | None = None
    for model, revision in dict.fromkeys((record["model"], record["revision"]) for _, record in fetched):
        of_model = [
            (process, r["commit"]) for process, r in fetched if (r["model"], r["revision"]) == (model, revision)
        ]
        (_, first), *_ = of_model
        is_own = (model, revision) == (plan.model, plan.revision or "main")
        if any(commit != first for _, commit in of_model):
            key = "model.revision" if is_own else f"`revision` in {SPECULATIVE}"
            raise StartError(
                f"the nodes have different commits of {model} at {revision}",
                where="model.revision" if is_own else None,
                cause="it moved while they looked it up, or a node without the hub has an older one in its cache",
                todo=f"set {key} to one of these commits, e.g. {first}",
                evidence=tuple(f"{process.name}@{process.node}: {commit}" for process, commit in of_model),
            )
        own = first if is_own else own
    return own


async def _record(run: RunDir, process: Process) -> DownloadRecord:
    file = run.path / WEIGHTS_RECORDS / f"{process.name}.json"
    for _ in range(int(_PATIENCE_SECONDS / _LOOK_SECONDS)):
        if file.parent.is_dir() and file in list(file.parent.iterdir()):  # opening a folder shows what is new in it
            record: DownloadRecord = json.loads(file.read_text(encoding="utf-8"))
            return record
        await asyncio.sleep(_LOOK_SECONDS)
    raise StartError(
        "it has ended well, but left no record of the commit that it fetched",
        where=f"{process.name}@{process.node}",
        cause="the run directory is not the same folder on that node",
        todo=f"look for {file} there, and set PDSERVE_HOME to a folder that all nodes share",
    )
