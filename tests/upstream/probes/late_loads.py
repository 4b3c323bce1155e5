"""LMCache loads that hang and end late, on the real Scheduler and LMCacheMPConnector; blocks have contents here.

See waiting_loads.
"""

from __future__ import annotations

import random
import time
from typing import Any

from pdserve.patches import effects
from pdserve.patches.scheduler.given_up_loads import NAME
from pdserve.patches.scheduler.load_timeout import ATTRIBUTE
from tests.upstream.probes.lmcache_engine import Engine, upstream_module
from tests.upstream.probes.lmcache_ledger import LedgerAdapter

SECONDS = 3.0
PROMPT = list(range(1000, 1300))


class HangingEngine(Engine):
    """Loads of the names in `hanging` write nothing and do not end until `end`."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(upstream_module(), {"load_timeout_seconds": SECONDS}, num_blocks=num_blocks, batch=64)
        self.hanging: set[str] = set()
        self.under_way: dict[str, tuple[Any, list[int], list[int]]] = {}
        self.now = 100.0
        self._ended: set[str] = set()
        timeout = getattr(self.lab.scheduler, ATTRIBUTE, None)
        if timeout is not None:
            timeout.clock = lambda: self.now
        update = self.lab.update
        self.lab.update = lambda output, finished_recving=(), **report: update(  # type: ignore[method-assign]
            output, finished_recving={*finished_recving, *self._take_ended()}, **report
        )

    def end(self, name: str) -> None:
        """The transfer writes now, and is reported with the next step; whoever has the blocks by then."""
        super()._retrieve(name, *self.under_way.pop(name))
        self._arriving.discard(name)
        self._ended.add(name)

    def _retrieve(self, name: str, op: Any, blocks: list[int], names: list[int]) -> None:
        if name in self.hanging:
            assert name not in self.under_way, "a second load of the same id"
            self.under_way[name] = (op, blocks, names)
        else:
            super()._retrieve(name, op, blocks, names)

    def _take_ended(self) -> set[str]:
        ended, self._ended = self._ended, set()
        return ended


def hanging_load() -> dict[str, Any]:
    """The load hangs, is given up, and ends when the request is long finished and others use the memory."""
    made = HangingEngine(num_blocks=60)
    free = made.lab.free_blocks
    made.ledger.store(PROMPT, 0, 256)
    made.hanging.add("a")
    made.add("a", PROMPT, max_tokens=3)
    made.step()
    made.step()
    made.now += SECONDS
    for _ in range(20):
        made.step()
    facts: dict[str, Any] = {"tokens": len(made.lab.outputs.get("a", []))}
    if not hasattr(made.lab.scheduler, ATTRIBUTE):
        return facts
    facts["lookups"] = made.ledger.lookups
    for index in range(4):
        made.add(f"other-{index}", list(range(5000 * (index + 1), 5000 * (index + 1) + 150)))
    made.step()
    made.end("a")
    return facts | {
        "done": made.run(),
        "locked": made.ledger.locked,
        "stored": made.stored,
        "all_blocks_free": made.lab.free_blocks == free,
        "trackers": len(made.lab.connector.request_trackers),
    }


def preempt(scheduler: Any, request: Any) -> None:
    """As when memory is short, at a time that the test chooses."""
    scheduler.running.remove(request)
    scheduler._preempt_request(request, time.monotonic())
    scheduler.prev_step_scheduled_req_ids.discard(request.request_id)


def simulate(seed: int) -> dict[str, int]:
    """A starved engine with shared prefixes; every third load hangs; clients leave; transfers end late or never."""
    chance = random.Random(seed)
    made = HangingEngine(num_blocks=chance.randint(36, 60))
    LedgerAdapter.slow = chance.choice([0, 0, 1])
    free = made.lab.free_blocks
    before = effects.totals().get((NAME, "loads-given-up"), 0)
    prefixes = [[1_000_000 * (index + 1) + token for token in range(320)] for index in range(3)]
    for prefix in prefixes:
        made.ledger.store(prefix, 0, chance.choice([64, 128, 256]))
    names = [f"r{index}" for index in range(chance.randint(4, 9))]
    made.hanging = {name for name in names if chance.random() < 0.35}
    arriving = list(names)
    for _ in range(120):
        if arriving and chance.random() < 0.4:
            name = arriving.pop(0)
            tail = [chance.randrange(1 << 40) for _ in range(chance.randint(1, 60))]
            made.add(name, chance.choice(prefixes)[: chance.randint(30, 320)] + tail, chance.randint(1, 20))
        # One that leaves before it was admitted keeps its lookup's locks until the server ends its session.
        admitted = [name for name in names if made.lab.status(name) in ("RUNNING", "WAITING_FOR_REMOTE_KVS")]
        if admitted and chance.random() < 0.06:
            made.abort(chance.choice(admitted))
        if made.lab.scheduler.running and chance.random() < 0.15:
            preempt(made.lab.scheduler, chance.choice(made.lab.scheduler.running))
        if made.under_way and chance.random() < 0.08:
            made.end(chance.choice(sorted(made.under_way)))
        made.now += chance.random()
        made.step()
    for name in sorted(made.under_way):
        made.end(name)
    made.hanging.clear()
    for name in arriving:
        made.add(name, chance.choice(prefixes)[:100])
    assert made.run(), f"seed {seed}: {sorted(made.lab.scheduler.requests)} are left"
    assert made.lab.free_blocks == free, f"seed {seed}: {free - made.lab.free_blocks} blocks are missing"
    assert made.ledger.locked == 0, f"seed {seed}: {made.ledger.locked} locks are left"
    given_up = effects.totals().get((NAME, "loads-given-up"), 0) - before
    return {"given_up": int(given_up), "loads": len(made.loads)}


def unpatched() -> dict[str, Any]:
    return hanging_load()


def patched(workloads: int, seed: int) -> dict[str, Any]:
    """`workloads` random ones, beside the one of `unpatched`; a failure names its seed."""
    facts = hanging_load()
    runs = [simulate(seed + index) for index in range(workloads)]
    facts["simulated"] = {kind: sum(run[kind] for run in runs) for kind in ("given_up", "loads")}
    facts["quarantined"] = effects.totals().get((NAME, "quarantined-blocks"), 0)
    return facts
