"""Random requests with common prefixes on too few blocks, on the engine of lmcache_engine.py."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tests.upstream.lmcache_engine import CHUNK, OURS, Engine, LedgerAdapter, leaf

CAP, LEAST = "pdserve.max_tokens_per_load", "pdserve.min_load_tokens"


class Workload:
    """With aborts, preemptions, lookups that take their time, evictions.

    `bounded`: with a cap and a minimum. `failing`: the share of loads that fail. `batches`: tokens of a step, one is
    drawn; what is no multiple of a block leaves blocks computed in part.
    """

    def __init__(
        self,
        seed: int,
        module: str = OURS,
        *,
        bounded: bool = True,
        failing: float = 0,
        batches: Sequence[int] = (64, 256),
    ) -> None:
        self.dice = random.Random(seed)
        cap = self.dice.choice([64, 128, 256, 512])
        least = self.dice.choice([0, 0, 64, 128])
        extra = {CAP: cap, LEAST: min(cap, least)} if bounded else {}
        LedgerAdapter.slow = self.dice.choice([0, 0, 1, 3])
        num_blocks = self.dice.randint(48, 90)
        self.engine = Engine(leaf(module, **extra), num_blocks=num_blocks, batch=self.dice.choice(batches))
        if failing:
            self.engine.fails = lambda _: self.dice.random() < failing
        self.stems = [[self.dice.randrange(1000) for _ in range(640)] for _ in range(2)]
        for stem in self.stems:
            self.engine.ledger.store(stem, 0, self.dice.randrange(0, 641, CHUNK))
        self.preempted = 0

    def run(self) -> str:
        """ "done" or "deadlock"; whatever is wrong is an AssertionError."""
        for name in (f"r{number}" for number in range(10)):
            stem = self.dice.choice(self.stems)[: self.dice.randrange(0, 640)]
            tail = [self.dice.randrange(1000) for _ in range(self.dice.randrange(1, 60))]
            self.engine.add(name, stem + tail, max_tokens=self.dice.choice([1, 4, 40]))
            for _ in range(self.dice.choice([0, 1, 4])):
                self.step()
            if self.dice.random() < 0.15:
                self.engine.abort(f"r{self.dice.randrange(10)}")
        verdict = "done" if self._drain() else "deadlock"
        for name in list(self.engine.lab.scheduler.requests):
            self.engine.abort(name)
        assert self._drain(), "aborted requests stay"
        for _ in range(5):
            self.step()
        assert self.engine.ledger.locked == 0, f"{self.engine.ledger.locked} locks left"
        assert not self.engine.connector.request_trackers
        assert self.engine.lab.free_blocks == self.engine.free_at_start, "blocks are lost"
        return verdict

    def step(self) -> None:
        running = {name: request.status.name for name, request in self.engine.lab.scheduler.requests.items()}
        self.engine.step()
        self.preempted += sum(
            before == "RUNNING" and self.engine.lab.status(name) == "PREEMPTED" for name, before in running.items()
        )
        if self.dice.random() < 0.1:
            free = sorted(name for name in self.engine.ledger.chunks if not self.engine.ledger.locks[name])
            self.engine.ledger.chunks -= set(self.dice.sample(free, len(free) // 4))

    def _drain(self) -> bool:
        idle = 0
        before: tuple[int, ...] = ()
        while self.engine.lab.scheduler.requests and idle < 60:
            self.step()
            now = (self.engine.computed, len(self.engine.loads), len(self.engine.lab.scheduler.requests))
            idle, before = idle + 1 if before == now else 0, now
        return not self.engine.lab.scheduler.requests


def workloads(number: int, module: str = OURS, **how: Any) -> dict[str, Any]:
    """Return what becomes of each; keywords of Workload."""
    verdicts: Counter[str] = Counter()
    loads = preempted = 0
    wrong: list[str] = []
    for seed in range(number):
        workload = Workload(seed, module, **how)
        try:
            verdicts[workload.run()] += 1
        except AssertionError as error:
            wrong.append(f"seed {seed}: {error}")
        loads += len(workload.engine.loads)
        preempted += workload.preempted
    LedgerAdapter.slow = 0
    return {"verdicts": verdicts, "loads": loads, "preempted": preempted, "wrong": wrong}
