"""Random workloads on the real Scheduler, with and without our patches. See guards.

By hand, more of them: `python -m tests.upstream.probes.simulation 5000 [FIRST_SEED]`.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from pdserve.patches.scheduler import failed_loads_stand_back, ready_waiters_first, stale_completions
from tests.upstream.scheduler_lab import KVConnectorOutput, Lab, Scheduler
from tests.upstream.simulation import Outcome, run, shrink
from tests.upstream.workload import Workload, draw

NOISE = 0.3
CAPS = (0, 64, 256)


def reports_failed_loads() -> bool:
    """Whether workers can report that a whole load has failed (0.30), the only way with several KV groups."""
    return "failed_recving" in {field.name for field in fields(KVConnectorOutput)}


def loaded_go_first() -> bool:
    """Whether this upstream's scheduler takes those first whose KV has arrived (0.31)."""
    return not hasattr(Scheduler, "_select_waiting_queue_for_scheduling")


def unguarded(runs: int) -> dict[str, Any]:
    """Upstream, without and with bogus notifications."""
    return {
        name: _summary(draw(seed, noise=noise, failed_recving=reports_failed_loads()) for seed in range(runs))
        for name, noise in (("quiet", 0), ("noise", NOISE))
    }


def guarded(runs: int) -> dict[str, Any]:
    """With the guard against stale completions, and no bogus ones: deadlocks for each cap of a load in tokens."""
    stale_completions.PATCH.apply()
    return {
        str(cap): _summary(draw(seed, noise=0, cap=cap, failed_recving=reports_failed_loads()) for seed in range(runs))
        for cap in CAPS
    }


def patched(runs: int, first: int = 0) -> dict[str, Any]:
    """With all patches of the scheduler that this version needs, without and with overlapping steps, and with peers
    that offer their KV again after a failed load."""
    stale_completions.PATCH.apply()
    if not loaded_go_first():
        ready_waiters_first.PATCH.apply()
    failed_loads_stand_back.PATCH.apply()
    results = {}
    for name, overlap, again in (
        ("in turn", False, False),
        ("overlapping", True, False),
        ("offered again", False, True),
    ):
        workloads = (
            draw(seed, noise=NOISE, overlap=overlap, failed_recving=reports_failed_loads(), offers_again=again)
            for seed in range(first, first + runs)
        )
        results[name] = _summary(workloads, shrunk=True)
    return results


def preemption_cascade() -> bool:
    """Whether two plain requests that do not fit beside each other preempt each other for ever (vllm#49674)."""
    lab = Lab(num_blocks=9, max_num_batched_tokens=512, max_num_seqs=2, async_scheduling=True)
    lab.add("long", 84, max_tokens=15)
    waiting: list[Any] = []
    for step in range(400):
        if step == 7:
            lab.add("short", 19, max_tokens=19)
        waiting.append(lab.schedule())
        if len(waiting) == 2:
            lab.update(waiting.pop(0))
    return lab.busy


def _summary(workloads: Iterable[Workload], *, shrunk: bool = False) -> dict[str, Any]:
    """Outcomes by kind; of each bad kind the first, shrunk to the jobs that it takes if that is asked for."""
    kinds: Counter[str] = Counter()
    first: dict[str, tuple[Workload, Outcome]] = {}
    noises = 0
    for workload in workloads:
        outcome = run(workload)
        kinds[outcome.kind] += 1
        noises += outcome.noises
        if outcome.kind != "ok":
            first.setdefault(outcome.kind, (workload, outcome))
    failures = {kind: _reproduction(*failure, shrunk=shrunk) for kind, failure in first.items()}
    return {"runs": kinds.total(), "noises": noises, "kinds": dict(kinds), "failures": failures}


def _reproduction(workload: Workload, outcome: Outcome, *, shrunk: bool) -> str:
    if not shrunk:
        return f"seed {workload.seed}: {outcome.detail}"
    small = shrink(workload, outcome)
    jobs = ", ".join(job.name for job in small.jobs)
    return f"seed {workload.seed}, jobs {jobs} of {len(workload.jobs)}, {small.lab}: {run(small).detail}"


if __name__ == "__main__":
    print(json.dumps(patched(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)))
