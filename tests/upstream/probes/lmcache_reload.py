"""What one reload takes from LMCache, with upstream's class and with ours, on the real Scheduler.

`python -m tests.upstream.probes.lmcache_reload WORKLOADS`: JSON of the cases below.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from pdserve.patches import effects
from tests.upstream.probes.lmcache_engine import OURS, Engine, upstream_module
from tests.upstream.probes.lmcache_ledger import CHUNK, LedgerAdapter

CAP, LEAST = "pdserve.max_tokens_per_load", "pdserve.min_load_tokens"
PROMPT = list(range(1000, 2800))
STORED = len(PROMPT) // CHUNK * CHUNK


def engine(
    module: str, extra: dict[str, Any], *, stored: int = STORED, num_blocks: int = 400, multi: bool = False
) -> Engine:
    made = Engine(module, extra, num_blocks=num_blocks, multi=multi)
    made.ledger.store(PROMPT, 0, stored)
    return made


def summary(made: Engine, done: bool) -> dict[str, Any]:
    return {
        "done": done,
        "loads": [load[1:] for load in made.loads],
        "computed": made.computed,
        "stored": made.stored,
        "locked": made.ledger.locked,
        "free": made.lab.free_blocks,
        "trackers": len(made.connector.request_trackers),
    }


def reload(module: str, extra: dict[str, Any], stored: int = STORED, *, multi: bool = False) -> dict[str, Any]:
    made = engine(module, extra, stored=stored, multi=multi)
    made.add("a", PROMPT)
    return summary(made, made.run())


def local_prefix_inside_a_chunk(module: str, extra: dict[str, Any]) -> dict[str, Any]:
    """vLLM has 48 tokens of the prompt itself; chunks have 64."""
    made = engine(module, extra)
    made.add("warm", [*PROMPT[:48], *range(9000, 9010)])
    assert made.run()
    before = made.computed
    made.add("a", PROMPT)
    return {**summary(made, made.run()), "computed": made.computed - before}


def waits_for_blocks(module: str, extra: dict[str, Any]) -> dict[str, Any]:
    """Another request holds the blocks for many steps, in each of which vLLM asks again."""
    made = engine(module, extra, num_blocks=130)
    made.add("other", list(range(5000, 5900)), max_tokens=24)
    made.step()
    made.step()
    LedgerAdapter.polls.clear()
    made.add("a", PROMPT)
    done = made.run()
    return {**summary(made, done), "polls": LedgerAdapter.polls["a"]}


def aborted_before_admission(
    module: str, extra: dict[str, Any], slow: int = 0, *, multi: bool = False
) -> dict[str, Any]:
    LedgerAdapter.slow = slow
    made = engine(module, extra, num_blocks=130, multi=multi)
    made.add("other", list(range(5000, 5900)), max_tokens=24)
    made.step()
    made.step()
    made.add("a", PROMPT)
    made.step()
    locked = made.ledger.locked
    made.abort("a")
    LedgerAdapter.slow = 0
    return {**summary(made, made.run()), "locked before": locked}


def naive_cap(module: str) -> str:
    """Only the answer is lowered, as it was published: the tracker still says that everything is loaded."""
    upstream: Any = __import__(module, fromlist=["LMCacheMPConnector"]).LMCacheMPConnector
    original = upstream.get_num_new_matched_tokens

    def capped(self: Any, request: Any, computed: int) -> tuple[int | None, bool]:
        tokens, load_async = original(self, request, computed)
        return (None if tokens is None else min(tokens, 512)), load_async

    upstream.get_num_new_matched_tokens = capped
    try:
        reload(module, {})
    except (AssertionError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        upstream.get_num_new_matched_tokens = original
    return "fine"


class Workload:
    """Requests with common prefixes on too few blocks: aborts, preemptions, lookups that take their time, evictions.

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
        self.engine = Engine(module, extra, num_blocks=self.dice.randint(48, 90), batch=self.dice.choice(batches))
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
        assert self.engine.lab.free_blocks == self.engine.lab.pool.num_gpu_blocks - 1, "blocks are lost"
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
        while self.engine.lab.scheduler.requests and idle < 60:
            before = (self.engine.computed, len(self.engine.loads), len(self.engine.lab.scheduler.requests))
            self.step()
            after = (self.engine.computed, len(self.engine.loads), len(self.engine.lab.scheduler.requests))
            idle = idle + 1 if before == after else 0
        return not self.engine.lab.scheduler.requests


def workloads(count: int, module: str = OURS, **how: Any) -> dict[str, Any]:
    """What becomes of each; keywords of Workload."""
    verdicts: Counter[str] = Counter()
    loads = preempted = 0
    wrong: list[str] = []
    for seed in range(count):
        workload = Workload(seed, module, **how)
        try:
            verdicts[workload.run()] += 1
        except AssertionError as error:
            wrong.append(f"seed {seed}: {error}")
        loads += len(workload.engine.loads)
        preempted += workload.preempted
    LedgerAdapter.slow = 0
    return {"verdicts": verdicts, "loads": loads, "preempted": preempted, "wrong": wrong}


def main() -> None:
    module = upstream_module()
    cap, least = {CAP: 512}, {LEAST: 128}
    results: dict[str, Any] = {"upstream": module, "naive cap": naive_cap(module)}
    nothing: dict[str, Any] = {}
    without = (("theirs", module, nothing, nothing), ("without bounds", OURS, nothing, nothing))
    for name, where, capped, at_least in (*without, ("ours", OURS, cap, least)):
        results[name] = {
            "whole": reload(where, capped),
            "inside": local_prefix_inside_a_chunk(where, capped),
            "small": reload(where, at_least, stored=CHUNK),
            "small enough": reload(where, at_least, stored=2 * CHUNK),
            "waits": waits_for_blocks(where, capped),
            "aborted": aborted_before_admission(where, capped),
            "aborted, no answer yet": aborted_before_admission(where, capped, slow=3),
        }
    results["effects"] = {f"{patch} {effect}": value for (patch, effect), value in effects.totals().items()}
    results["child"] = {
        "whole": reload(OURS, cap, multi=True),
        "small": reload(OURS, least, stored=CHUNK, multi=True),
        "aborted": aborted_before_admission(OURS, cap, multi=True),
        "aborted, no answer yet": aborted_before_admission(OURS, cap, slow=3, multi=True),
    }
    count = int(sys.argv[1])
    results["random without bounds"] = {name: workloads(count, where, bounded=False) for name, where, *_ in without}
    results["random"] = workloads(count)
    results["random effects"] = {f"{patch} {effect}": value for (patch, effect), value in effects.totals().items()}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
