"""Proves a deployment before it is ready, and one of its instances before it is back: patches, weights, attachment to
LMCache, and canaries of one token through the proxy, one engine, or one pair of prefill and decode."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal, TypedDict
from urllib.parse import urlencode

from pdserve.errors import StartError
from pdserve.launch.failure import not_attached
from pdserve.launch.fleet import OTHER_GENERATION, Fleet, InstanceRouting, bearer, json_object
from pdserve.lmcache_server import wait_attached
from pdserve.logs.lines import GrowingLog, message
from pdserve.plan.model import LmcacheServer, Plan
from pdserve.plan.preparation import WEIGHTS_RECORDS
from pdserve.plan.process import HttpProbe, Process
from pdserve.preflight.reachability import CrossNodePort, side_channels
from pdserve.reach.protocol import AskNode
from pdserve.recipe.effective import SPECULATIVE
from pdserve.run.directory import RunDir
from pdserve.run.patch_proof import find_unpatched_engine, records

if TYPE_CHECKING:
    from pdserve.observe.metrics import EngineSnapshot


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


_RETRY_SECONDS = 0.2
_ASK_SECONDS = 3.0
_PROMPT = "pdserve canary"
_IDLE_SECONDS = 4.5
"""In which an idle pair should answer: what is later is in the history, and asked once more before it is judged."""
_AGAIN_SECONDS = 30.0
_DEATH_SECONDS = 0.5
_COUNT_SECONDS = 2.0
"""Engines count a little after they answer."""
_NEW_SECONDS = 3.0
"""By which the proxy hears of a new worker, or is back itself."""
_FEWEST_TOKENS = 259
"""Enough that what a busy decode computes for others meanwhile, a token of each of their prompts, is less."""
_LATE = 504


@dataclass(frozen=True)
class Canary:
    """Holds the outcome of a canary. `text`: the last answer, for people."""

    ok: bool
    seconds: float
    text: str


async def one_token(ask: AskNode, url: str, model: str, *, seconds: float, key: str | None = None) -> Canary:
    """Asks for one token until it comes or the time is over. 503 and refused connections are tried again."""
    began = time.monotonic()
    text = "no answer"
    headers = {} if key is None else bearer(key)
    body = json.dumps({"model": model, "prompt": _PROMPT, "max_tokens": 1, "temperature": 0})
    while (left := seconds - (time.monotonic() - began)) > 0:
        answer = await ask("POST", f"{url}/v1/completions", headers=headers, body=body, seconds=left)
        text = answer.error if answer.status is None else f"{answer.status} {answer.body[:300]}"
        if answer.status == 200 and json_object(answer).get("choices"):
            return Canary(True, time.monotonic() - began, "one token")
        if not (answer.refused or answer.status == 503):
            break
        await asyncio.sleep(_RETRY_SECONDS)
    return Canary(False, time.monotonic() - began, text)


class PairCanaries:
    """Sends canaries through the proxy of a fleet, and writes into its history what each has shown."""

    def __init__(self, fleet: Fleet, *, engine_key: str) -> None:
        self._fleet, self._key = fleet, engine_key

    async def cross(self, prefill: str, decode: str, *, new: str, seconds: float) -> Outcome:
        """Send KV through two workers of the proxy, of which `new` is not routed to, within so many seconds. A first
        try that fails is followed by a second one."""
        until = time.monotonic() + seconds
        outcome: Outcome = "unknown"
        for patience in (_IDLE_SECONDS, _AGAIN_SECONDS):
            began = time.monotonic()
            outcome, text = await self._cross(prefill, decode, new=new, patience=patience, until=until)
            ok = {"crossed": True, "failed": False, "unknown": None}[outcome]
            peer, took = (decode if new == prefill else prefill), round(time.monotonic() - began, 3)
            self._fleet.record("canary", name=new, peer=peer, ok=ok, seconds=took, text=text)
            if outcome != "failed":
                break
        return outcome

    async def _cross(
        self, prefill: str, decode: str, *, new: str, patience: float, until: float
    ) -> tuple[Outcome, str]:
        """Send a prompt across a pair and tell what became of it. `patience`: seconds that an idle pair gets; a busy
        one gets all that are left. `new`: which of the two has just been started. `until`: when the time is over."""
        left = min(until - time.monotonic(), self._fleet.plan.proxy.request_timeout_seconds)
        if left < _RETRY_SECONDS:
            return "unknown", "no time was left for it"
        peer, proxy = decode if new == prefill else prefill, self._fleet.on_node_of("proxy")
        running = await _in_flight(proxy, self._fleet.plan.proxy_url, key=self._key)
        idle = running is not None and not running.get(peer)
        before = await self._read_counters(decode)
        tokens = 1 + max(_FEWEST_TOKENS, 2 * (before.block_size or 0))
        status, text = await self._send_pair(prefill, decode, tokens, min(patience, left) if idle else left)
        if status == _LATE:
            return "failed" if idle else "unknown", text
        if status is None or 400 <= status < 500:
            return "unknown", text
        if status != 200:
            # Who has died is not to blame for more than that, which the launcher hears in a moment.
            await asyncio.sleep(_DEATH_SECONDS)
            return "failed", text
        received = await self._has_received(decode, before, tokens)
        if received is None:
            return "crossed", "one token; what it was computed from was not counted"
        if received:
            return "crossed", f"one token, after KV of {tokens} tokens"
        return "failed", f"one token, but {decode} computed the prompt itself: it received no KV"

    async def _send_pair(self, prefill: str, decode: str, tokens: int, seconds: float) -> tuple[int | None, str]:
        """Ask the proxy for a canary, and return the answer's status and text. None: the proxy did not answer at
        all."""
        asked = {"prefill": prefill, "decode": decode, "tokens": tokens, "seconds": f"{seconds:.3f}"}
        url = f"{self._fleet.plan.proxy_url}/canary?{urlencode(asked)}"
        patient_until = time.monotonic() + _NEW_SECONDS
        while True:
            proxy = self._fleet.on_node_of("proxy")
            answer = await proxy("POST", url, headers=bearer(self._key), seconds=seconds + _ASK_SECONDS)
            text = answer.error if answer.status is None else f"{answer.status} {answer.body[:300]}"
            unheard = answer.refused or answer.status == 404
            if not unheard or time.monotonic() >= patient_until:
                return answer.status, text
            await asyncio.sleep(_RETRY_SECONDS)

    async def _has_received(self, decode: str, before: EngineSnapshot, tokens: int) -> bool | None:
        """Ask decode's counters whether it received the KV of such a prompt since then. Others count too where it
        serves already: it computes one token of each of their prompts, and None is the answer where that could be
        it."""
        last: bool | None = None
        until = time.monotonic() + _COUNT_SECONDS
        while True:
            await asyncio.sleep(_RETRY_SECONDS)
            after = await self._read_counters(decode)
            if before.prompt_tokens is None or after.prompt_tokens is None:
                return None
            grown = {source: count - before.prompt_tokens[source] for source, count in after.prompt_tokens.items()}
            got, computed = grown["external_kv_transfer"] * 2 >= tokens, grown["local_compute"] * 2 >= tokens
            if got and not computed:
                return True
            last = None if got or not computed else False
            if time.monotonic() >= until:
                return last

    async def _read_counters(self, worker: str) -> EngineSnapshot:
        # With httpx, which a launcher needs only where an engine is started anew.
        from pdserve.observe.metrics import engine_figures, samples_of

        probe = self._fleet.plan.process(worker).probe
        assert isinstance(probe, HttpProbe)
        url = f"http://{probe.host}:{probe.port}"
        answer = await self._fleet.on_node_of(worker)("GET", f"{url}/metrics", seconds=_ASK_SECONDS)
        if answer.status != 200:
            return engine_figures(url, answer.error or f"HTTP {answer.status}")
        try:
            return engine_figures(url, await asyncio.to_thread(samples_of, answer.body))
        except ValueError as error:
            return engine_figures(url, f"unreadable answer: {error}")


async def _in_flight(ask: AskNode, proxy_url: str, *, key: str) -> dict[str, int] | None:
    """Return the requests that the proxy has in flight, by worker. None: it cannot be asked."""
    answer = await ask("GET", f"{proxy_url}/workers", headers=bearer(key), seconds=_ASK_SECONDS)
    try:
        return {entry["name"]: entry["in_flight"] for entry in json_object(answer)["workers"]}
    except (KeyError, TypeError):
        return None


Outcome = Literal["crossed", "failed", "unknown"]
"""unknown: it says nothing of either, as when the peer had no time for a canary, or died."""

_LIVES: Final = 2
AGAIN_SECONDS: Final = 600.0


@dataclass(frozen=True)
class PeerVerdict:
    """Says what the canaries of one new engine have shown."""

    proven: bool
    """It may be routed to."""
    bad: tuple[str, ...] = ()
    """Peers that are broken, and are to be restarted."""
    try_again: bool = False
    """The peers are broken that could have shown whether the new engine is well: it is to be tried once more, after
    their restart."""
    spared: tuple[str, ...] = ()
    """Peers that failed again although they were restarted for it."""


class PeerJudge:
    """Judges who is to blame when no KV crosses between a new engine and one of the other role that served before it.

    An engine that was started anew is tried with each peer that serves. KV that crosses with one of them shows that the
    new engine is well: the peers that failed are the broken ones. Where it fails with all, it is the suspect itself and
    is started again; a peer that fails with that life too, and with none in between crossed, is the broken one after
    all. A peer is restarted for this once in ten minutes: a pair that fails after that has another cause (its network),
    and restarts would only cost requests. Times are of one clock that never goes back.
    """

    def __init__(self) -> None:
        self._failures: Counter[str] = Counter()
        """Lives of new engines with which a peer failed, since it was started or KV last crossed with it."""
        self._restarted: dict[str, float] = {}

    def started(self, engine: str) -> None:
        """Note that an engine begins a new life."""
        self._failures.pop(engine, None)

    def judge(self, outcomes: Mapping[str, Outcome], now: float) -> PeerVerdict:
        """Judge the canaries of one new engine, given by peer."""
        crossed = [peer for peer, outcome in outcomes.items() if outcome == "crossed"]
        failed = [peer for peer, outcome in outcomes.items() if outcome == "failed"]
        for peer in crossed:
            self._failures.pop(peer, None)
        self._failures.update(failed)
        if not failed:
            return PeerVerdict(proven=True)
        broken = failed if crossed else [peer for peer in failed if self._failures[peer] >= _LIVES]
        spared = tuple(peer for peer in broken if now - self._restarted.get(peer, -AGAIN_SECONDS) < AGAIN_SECONDS)
        bad = tuple(peer for peer in broken if peer not in spared)
        if not crossed:
            # One at a time: they still serve with engines that are older.
            bad = bad[:1]
        self._restarted.update(dict.fromkeys(bad, now))
        return PeerVerdict(proven=bool(crossed), bad=bad, try_again=bool(bad) and not crossed, spared=spared)
