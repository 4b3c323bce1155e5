"""Workloads for a scheduler with too small a KV pool, each drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from tests.upstream.scheduler_lab import mock, multi


@dataclass(frozen=True)
class Job:
    """One request of a workload. Times in steps, lengths in tokens."""

    name: str
    arrives: int
    prompt: tuple[int, ...]
    max_tokens: int
    script: dict[str, Any]
    aborted: int | None


@dataclass(frozen=True)
class Workload:
    seed: int
    lab: dict[str, Any]
    jobs: tuple[Job, ...]
    noise: float
    """Probability of a bogus notification in a step."""
    children: tuple[str, ...]
    """Names of the mocks."""

    def without(self, job: Job) -> Workload:
        return Workload(
            self.seed, self.lab, tuple(each for each in self.jobs if each is not job), self.noise, self.children
        )


def draw(
    seed: int,
    *,
    noise: float,
    overlap: bool | None = None,
    cap: int | None = None,
    failed_recving: bool = False,
    offers_again: bool = False,
) -> Workload:
    """`overlap`: of steps, by asynchronous scheduling. `cap`: tokens of each load, 0 for none. None: drawn, either.

    `failed_recving`: this vLLM has that report. `offers_again`: peers offer their KV again after a load has failed.
    """
    rng = random.Random(seed)
    num_blocks = rng.randint(8, 32)
    usable = (num_blocks - 1) * 16
    sliding = failed_recving and rng.random() < 0.15
    names = ("left", "right") if rng.random() < 0.2 else ("mock",)
    if cap is None:
        cap = rng.choice((0, 0, 32, 64, 128, 256))
    shared = [rng.choices(range(10, 500), k=usable) for _ in range(2)]
    jobs = []
    for index in range(rng.randint(3, 14)):
        max_tokens = rng.randint(1, 24)
        # Two groups take a block each for the same tokens; a request must fit when it is alone.
        length = rng.randint(1, max(1, (usable // (2 if sliding else 1)) - max_tokens - 16))
        if offers_again:
            # A prompt of one token has nothing computed after its load, and upstream asks for the same load again.
            length = max(length, 2)
        own = [1000 + 500 * index + position for position in range(length)]
        common = rng.choice((0, 0, rng.randint(0, length)))
        prompt = (*rng.choice(shared)[:common], *own[common:])
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
        jobs.append(Job(f"r{index}", arrives, prompt, max_tokens, script, aborted))
    lab = {
        "num_blocks": num_blocks,
        "max_num_batched_tokens": rng.choice((32, 64, 128, 512)),
        "max_num_seqs": rng.choice((2, 4, 16)),
        "connector": mock() if names == ("mock",) else multi(*(mock(name) for name in names)),
        "load_failure_policy": rng.choice(("recompute", "recompute", "fail")),
        "sliding_window": 48 if sliding else None,
        "async_scheduling": rng.random() < 0.5 if overlap is None else overlap,
        "prefix_caching": rng.random() < 0.8,
        "scheduler": {"policy": rng.choice(("fcfs", "fcfs", "priority"))},
    }
    return Workload(seed, lab, tuple(jobs), noise, names)
