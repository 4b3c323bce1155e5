"""How long a sweep will take, by points that were measured before. Pure."""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.bench.workload import Load, Workload
from pdserve.sweep.points import Point
from pdserve.sweep.record import PointRecord


@dataclass(frozen=True)
class Estimate:
    """Of what is still to be run."""

    seconds: float
    """Of what is known."""
    unknown_points: int
    """Without a former measurement of the same work and load."""
    starts: int
    unknown_starts: int


def estimate(to_run: Sequence[Point], former: Sequence[PointRecord], starts: int) -> Estimate:
    """A point takes as long as those of the same work and load did on other deployments, a start as long as others.
    `starts`: that these points need."""
    measured: dict[tuple[str, str], list[float]] = {}
    for record in former:
        if record.result is not None:
            measured.setdefault(_same(record.workload, record.load), []).append(record.seconds)
    known = [measured.get(_same(point.workload, point.load)) for point in to_run]
    took = [record.start_seconds for record in former if record.start_seconds is not None]
    seconds = sum(statistics.fmean(each) for each in known if each) + (statistics.fmean(took) * starts if took else 0.0)
    return Estimate(seconds, sum(each is None for each in known), starts, 0 if took else starts)


def array_seconds(tasks: Sequence[Estimate], at_once: int | None) -> float:
    """Of tasks that run beside each other, as Slurm starts them: in their order, each once another one has ended.
    Without the time in the queue."""
    if not tasks:
        return 0.0
    slots = [0.0] * min(len(tasks), at_once or len(tasks))
    for task in tasks:
        heapq.heapreplace(slots, slots[0] + task.seconds)
    return max(slots)


def _same(workload: Workload, load: Load) -> tuple[str, str]:
    return workload.model_dump_json(), load.model_dump_json()
