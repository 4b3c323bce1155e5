"""Random KV-starved workloads on the real Scheduler, and what must hold at every step of them.

A workload is drawn from a seed; what happens to its transfers is drawn while it runs, from the same seed. Transfers
behave as the connectors' contract says, except for noise: notifications that are stale, doubled or of no request.
"""

from __future__ import annotations

import random
import traceback
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from pdserve.patches.scheduler import failed_loads_stand_back, ready_waiters_first, stale_completions
from tests.upstream.scheduler_lab import KVConnectorOutput, Lab, Load, Scheduler, mock, multi

PATIENCE = 30
"""Steps without any progress, every transfer having ended, after which a workload is called deadlocked."""
LIMIT = 1500
"""Steps after which it is called endless; the longest that ends takes a few hundred."""
NOISE = 0.3
REPORTS_FAILED_LOADS = "failed_recving" in {each.name for each in fields(KVConnectorOutput)}
"""Whether workers can report that a whole load has failed (0.30), the only way with several KV groups."""
LOADED_GO_FIRST = not hasattr(Scheduler, "_select_waiting_queue_for_scheduling")
"""Whether this upstream's scheduler takes those first whose KV has arrived (0.31)."""


class Job(NamedTuple):
    """One request of a workload. Times in steps, lengths in tokens."""

    name: str
    arrives: int
    prompt: list[int]
    max_tokens: int
    script: dict[str, Any]
    aborted: int | None


class Violated(Exception):  # noqa: N818
    """An invariant; its first argument is the kind."""


@dataclass
class Transfers:
    """What is under way, as the workers would know it."""

    loads: dict[str, Load] = field(default_factory=dict)
    sends: set[str] = field(default_factory=set)
    seen: Counter[int] = field(default_factory=Counter)
    """Entries of each book's loads and delayed that were taken over."""
    loaded: set[str] = field(default_factory=set)
    """Ids of which the end of a load was reported."""
    only_sent: set[str] = field(default_factory=set)
    """Ids whose send began when no load was under way: nothing but its end may free their blocks."""
    reported: set[str] = field(default_factory=set)
    """Ids of which anything was ever reported: the stale ones are drawn from them."""


class Simulation:
    """One run of a workload.

    `noise`: probability of a bogus notification in a step. `overlap`: of steps, by asynchronous scheduling; `cap`:
    tokens of each load, 0 for none; None: drawn, either. `offers_again`: peers offer their KV again after a load has
    failed. `ours`: two mocks under our MultiConnector.
    """

    def __init__(
        self,
        seed: int,
        *,
        noise: float,
        overlap: bool | None = None,
        cap: int | None = None,
        offers_again: bool = False,
        ours: bool = False,
    ) -> None:
        self.jobs: list[Job] = []
        rng = random.Random(seed)
        num_blocks = rng.randint(8, 32)
        usable = (num_blocks - 1) * 16
        sliding = REPORTS_FAILED_LOADS and rng.random() < 0.15
        names = ("left", "right") if ours or rng.random() < 0.2 else ("mock",)
        if cap is None:
            cap = rng.choice((0, 0, 32, 64, 128, 256))
        shared = [rng.choices(range(10, 500), k=usable) for _ in range(2)]
        for index in range(rng.randint(3, 14)):
            max_tokens = rng.randint(1, 24)
            # Two groups take a block each for the same tokens; a request must fit when it is alone.
            length = rng.randint(1, max(1, (usable // (2 if sliding else 1)) - max_tokens - 16))
            if offers_again:
                # A prompt of one token has nothing computed after its load, and upstream asks for the same load again.
                length = max(length, 2)
            own = [1000 + 500 * index + position for position in range(length)]
            common = rng.choice((0, 0, rng.randint(0, length)))
            prompt = [*rng.choice(shared)[:common], *own[common:]]
            script: dict[str, Any] = {}
            for name in names:
                script[name] = {
                    "matched": rng.choice((0, length, rng.randint(0, length))),
                    "load_async": rng.random() < 0.85,
                    "defers": rng.choice((0, 0, 0, 1, 3)),
                    "delay_free": rng.random() < 0.4,
                    "cap": cap,
                    "offers_again": offers_again,
                }
            arrives = rng.randint(0, 25)
            aborted = arrives + rng.choice((rng.randint(0, 40), rng.randint(1, 5))) if rng.random() < 0.3 else None
            self.jobs.append(Job(f"r{index}", arrives, prompt, max_tokens, script, aborted))
        connector = mock() if names == ("mock",) else multi(*(mock(name) for name in names))
        if ours:
            connector["kv_connector_module_path"] = "pdserve.connectors.multi"
        self.options: dict[str, Any] = {
            "num_blocks": num_blocks,
            "max_num_batched_tokens": rng.choice((32, 64, 128, 512)),
            "max_num_seqs": rng.choice((2, 4, 16)),
            "connector": connector,
            "load_failure_policy": rng.choice(("recompute", "recompute", "fail")),
            "sliding_window": 48 if sliding else None,
            "async_scheduling": rng.random() < 0.5 if overlap is None else overlap,
            "prefix_caching": rng.random() < 0.8,
            "scheduler": {"policy": rng.choice(("fcfs", "fcfs", "priority"))},
        }
        self.lab = Lab(**self.options)
        self.rng = random.Random(seed + 1)
        self.transfers = Transfers()
        self.now = 0
        self.noise, self.noises = noise, 0
        self._ours = ours
        self._in_flight: list[Any] = []
        self._idle = 0

    def run(self) -> None:
        last = max(job.arrives for job in self.jobs)
        while self.now <= last or self.lab.busy or self._in_flight or self.transfers.loads or self.transfers.sends:
            self._arrivals_and_aborts()
            before = self._progress()
            self._step()
            self._check()
            self._idle = 0 if self.now <= last or self._progress() != before else self._idle + 1
            if self._idle > 2 * PATIENCE:
                stuck = {name: request.status.name for name, request in self.lab.scheduler.requests.items()}
                raise Violated("deadlock", f"{stuck}, {self.lab.free_blocks} blocks free")
            self.now += 1
            if self.now > LIMIT:
                raise Violated("endless", str(sorted(self.lab.scheduler.requests)))
        self.lab.step()
        self._check_end()

    def _arrivals_and_aborts(self) -> None:
        for job in self.jobs:
            if job.arrives == self.now:
                self.lab.add(job.name, job.prompt, job.script, max_tokens=job.max_tokens)
            if job.aborted == self.now:
                self.lab.abort(job.name)

    def _progress(self) -> tuple[Any, ...]:
        loads = sum(len(book.loads) for book in self.lab.books)
        ended = sum(len(book.finished) for book in self.lab.books)
        tokens = sum(len(tokens) for tokens in self.lab.outputs.values())
        computed = sum(request.num_computed_tokens for request in self.lab.scheduler.running)
        return loads, ended, tokens, len(self.transfers.loads), len(self.transfers.sends), computed

    def _step(self) -> None:
        """Schedules; an asynchronous engine has two steps in flight."""
        self._in_flight.append(self.lab.schedule())
        self._take_over()
        depth = 2 if self.options["async_scheduling"] else 1
        while len(self._in_flight) >= depth or (self._in_flight and not self.lab.busy):
            self.lab.update(self._in_flight.pop(0), **self._report())
            self._take_over()

    def _take_over(self) -> None:
        """Transfers that the scheduler has started or asked for since."""
        for book in self.lab.books:
            for load in book.loads[self.transfers.seen[id(book)] :]:
                if load.request_id in self.transfers.loads:
                    raise Violated("two loads", f"{load.request_id} loads again before its load has ended")
                self.transfers.loads[load.request_id] = load
            self.transfers.seen[id(book)] = len(book.loads)
            for name in book.delayed[self.transfers.seen[id(book.delayed)] :]:
                self.transfers.sends.add(name)
                # A load that fails, where that is the request's end, is reported with it, and has freed it by now.
                if name not in self.transfers.loads and self.lab.get(name) is not None:
                    self.transfers.only_sent.add(name)
            self.transfers.seen[id(book.delayed)] = len(book.delayed)

    def _report(self) -> dict[str, Any]:
        """Return what the workers say after a step."""
        rng, transfers, hurry = self.rng, self.transfers, self._idle > PATIENCE
        received = {name for name in sorted(transfers.loads) if hurry or rng.random() < 0.25}
        # What was aborted while it loaded has nothing to send: LMCache says so at once.
        likely = {name: 0.7 if name in transfers.loads else 0.25 for name in sorted(transfers.sends)}
        sent = {name for name, chance in likely.items() if hurry or rng.random() < chance}
        report: dict[str, Any] = {"invalid_block_ids": set(), "failed_recving": set()}
        for name in sorted(received):
            load = transfers.loads.pop(name)
            if rng.random() < 0.15:
                self._fail(load, report)
        transfers.sends -= sent
        transfers.loaded |= received
        transfers.reported |= received | sent
        bogus_received, bogus_sent = self._noise() if rng.random() < self.noise else (set(), set())
        self.noises += len(bogus_received) + len(bogus_sent)
        return {**report, "finished_recving": received | bogus_received, "finished_sending": sent | bogus_sent}

    def _fail(self, load: Load, report: dict[str, Any]) -> None:
        for book in self.lab.books:
            book.failed.add(load.request_id)
        if len(load.blocks) > 1:
            report["failed_recving"].add(load.request_id)
            return
        first = max(0, len(load.blocks[0]) - -(-load.tokens // 16))
        loaded = load.blocks[0][first:]
        report["invalid_block_ids"] |= set(self.rng.sample(loaded, self.rng.randint(1, len(loaded))))

    def _noise(self) -> tuple[set[str], set[str]]:
        """Bogus notifications that can be told from real ones: none of a transfer of that kind that is under way.

        Nor of a load of a request that never loaded, has ended and is being sent: see the guard's text.
        """
        transfers, rng = self.transfers, self.rng
        names = sorted({*transfers.reported, *self.lab.scheduler.requests, "nobody"})
        received = {rng.choice(names)} - transfers.loads.keys() - (transfers.sends - transfers.loaded)
        sent = {rng.choice(names)} - transfers.sends
        if rng.random() < 0.3:
            return received, received - transfers.sends
        return (received, set()) if rng.random() < 0.5 else (set(), sent)

    def _check(self) -> None:
        _check_pool(self.lab)
        if freed := {name for name in self.transfers.sends & self.transfers.only_sent if self.lab.get(name) is None}:
            raise Violated("freed under a send", str(sorted(freed)))
        for name, load in self.transfers.loads.items():
            request = self.lab.get(name)
            if request is None:
                raise Violated("freed under a load", f"{name} is gone while {load} writes")
            if request.status.name not in ("WAITING_FOR_REMOTE_KVS", "FINISHED_ABORTED"):
                raise Violated("ran before its load", f"{name} is {request.status.name}")
            held = {block for group in range(len(load.blocks)) for block in self.lab.blocks(name, group)}
            if lost := {block for group in load.blocks for block in group} - held - {0}:
                raise Violated("freed under a load", f"{name} lost {lost}")

    def _check_end(self) -> None:
        scheduler = self.lab.scheduler
        left = sorted(scheduler.requests)
        queued = [*scheduler.finished_recving_kv_req_ids, *scheduler.failed_recving_kv_req_ids]
        if left or queued:
            raise Violated("leak", f"requests {left}, notifications {queued}")
        total = self.options["num_blocks"] - 1
        if self.lab.free_blocks != total:
            raise Violated("leak", f"{total - self.lab.free_blocks} of {total} blocks")
        if locks := set().union(*(book.locks for book in self.lab.books)):
            raise Violated("lock left", str(sorted(locks)))
        if self._ours and (kept := self.lab.kept_by_the_connector):
            raise Violated("leak", f"the connector keeps {kept}")
        for job in self.jobs:
            reason = self.lab.finish_reasons.get(job.name)
            made = len(self.lab.outputs.get(job.name, ()))
            if job.aborted is None and reason == "length" and made != job.max_tokens:
                raise Violated("output", f"{job.name} has {made} of {job.max_tokens} tokens")
            if job.aborted is None and reason not in ("length", "error"):
                raise Violated("output", f"{job.name} ended with {reason}")


def _check_pool(lab: Lab) -> None:
    """Each block is either free, and listed as such once, or held as often as it is counted."""
    scheduler, pool = lab.scheduler, lab.pool
    held: Counter[int] = Counter()
    for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
        for blocks in manager.req_to_blocks.values():
            held.update(block.block_id for block in blocks)
    for _, blocks in getattr(scheduler, "deferred_frees", ()):
        held.update(block.block_id for block in blocks)
    free = Counter(block.block_id for block in pool.free_block_queue.get_all_free_blocks())
    if len(free) != lab.free_blocks or any(times > 1 for times in free.values()):
        raise Violated("free list", f"{lab.free_blocks} counted, listed: {dict(free)}")
    for block in (each for each in pool.blocks if not each.is_null):
        counted = block.ref_cnt
        if counted != held[block.block_id] or (counted == 0) != (block.block_id in free):
            listed = "listed" if block.block_id in free else "not listed"
            raise Violated(
                "reference count",
                f"block {block.block_id}: {counted}, held {held[block.block_id]} times, {listed} free",
            )


def outcome(simulation: Simulation) -> tuple[str, str]:
    """Run it. ok, deadlock, endless, crash, or what was violated; and the detail."""
    try:
        simulation.run()
    except Violated as violated:
        return str(violated.args[0]), str(violated.args[1])
    except (AssertionError, KeyError, ValueError, RuntimeError) as error:
        # Whatever the scheduler raises kills an EngineCore.
        *_, where = traceback.extract_tb(error.__traceback__)
        return "crash", f"{type(error).__name__} {error} in {where.name}:{where.lineno}"
    return "ok", ""


def summary(seeds: Iterable[int], **how: Any) -> dict[str, Any]:
    """Return the outcomes by kind, and of each bad kind the first. Keywords of Simulation."""
    kinds: Counter[str] = Counter()
    failures: dict[str, str] = {}
    noises = 0
    for seed in seeds:
        simulation = Simulation(seed, **how)
        kind, detail = outcome(simulation)
        kinds[kind] += 1
        noises += simulation.noises
        if kind != "ok":
            failures.setdefault(kind, f"seed {seed}: {detail}, {simulation.options}")
    return {"runs": kinds.total(), "noises": noises, "kinds": dict(kinds), "failures": failures}


def patched(runs: int) -> dict[str, Any]:
    """With all patches of the scheduler that this version needs: without and with overlapping steps, with peers that
    offer their KV again after a failed load, and under our MultiConnector."""
    for each in (stale_completions, *(() if LOADED_GO_FIRST else (ready_waiters_first,)), failed_loads_stand_back):
        each.PATCH.apply()
    ways: dict[str, dict[str, bool]] = {
        "in turn": {"overlap": False},
        "overlapping": {"overlap": True},
        "offered again": {"overlap": False, "offers_again": True},
        "ours": {"overlap": False, "ours": True},
    }
    return {way: summary(range(runs), noise=NOISE, **how) for way, how in ways.items()}
