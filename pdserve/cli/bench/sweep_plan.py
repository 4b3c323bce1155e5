"""What a sweep will run, and how long that takes, before it runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pdserve.sweep.described import constant_settings, constant_work, letters, varied
from pdserve.sweep.estimate import Estimate
from pdserve.sweep.points import Point, Variant, by_deployment
from pdserve.sweep.record import POINTS, PointRecord, SweepFolder
from pdserve.sweep.resolve import PlannedSweep
from pdserve.sweep.stale import StalePoints

STATUS_STYLES = {"VALID": "green", "INVALID": "bold red", "to run": ""}


def show_plan(planned: PlannedSweep, some: Collection[Point], former: Mapping[str, PointRecord], out: Console) -> None:
    """What is the same at all points once, each deployment once, then a short row for each point."""
    points, name = planned.points, planned.loaded.sweep.name
    short, constant, work = letters(points), constant_settings(points), constant_work(points)
    out.print(Text(f"{name}: {len(points)} points on {len(short)} deployments, in their order", style="bold"))
    same = [*(f"{key}={value}" for key, value in constant), *work]
    if same:
        out.print(Text(f"the same at all points: {', '.join(same)}"))
    for deployment, letter in short.items():
        out.print(Text(f"{letter} {deployment.digest}: {varied(deployment, constant)}"))
    for why, some_letters in _by_cause(planned, some, short).items():
        out.print(Text(f"a new start before each point, to empty the caches of {', '.join(some_letters)}: {why}"))
    with_work, with_repeats = len({p.work for p in points}) > 1, len({p.workload.repeats for p in points}) > 1
    table = Table(header_style="bold")
    for column in ("", "deployment", *(["work"] if with_work else []), "load"):
        table.add_column(column)
    for column in (*(["repeats"] if with_repeats else []), "state"):
        table.add_column(column)
    number = 0
    for deployment, its_points in by_deployment(points):
        for place, point in enumerate(its_points):
            number += 1
            state = "to run" if point in some else former[point.id].status if point.id in former else "not run"
            table.add_row(
                str(number),
                short[deployment] if place == 0 else '"',
                *([Text(point.work)] if with_work else []),
                point.load.title,
                *([str(point.workload.repeats)] if with_repeats else []),
                Text(state, style=STATUS_STYLES.get(state, "")),
            )
    out.print(table)
    if (distinct := len(planned.recipes)) < planned.combinations:
        out.print(Text(f"{planned.combinations} combinations are {distinct} different recipes"))


def _by_cause(
    planned: PlannedSweep, some: Collection[Point], short: Mapping[Variant, str]
) -> Mapping[str, Sequence[str]]:
    """Of deployments with several points to run."""
    causes: dict[str, list[str]] = {}
    for deployment, letter in short.items():
        why = planned.start_for_each_point(deployment)
        if why is not None and sum(point.deployment == deployment for point in some) > 1:
            causes.setdefault(why, []).append(letter)
    return causes


def show_stale(planned: PlannedSweep, stale: StalePoints, folder: SweepFolder, out: Console) -> None:
    """Which points are not left as they were measured, and why; and which of them may be otherwise where they would be
    measured now."""
    for why, numbers in _by_reason(planned, stale.again).items():
        out.print(Text(f"measured again: {numbers}: {why}", style="yellow"))
    for why, numbers in _by_reason(planned, stale.named).items():
        out.print(Text(f"not measured again: {numbers}: {why}", style="yellow"))
    if stale.named:
        out.print(
            Text(
                "what the nodes have is not known here, and a task compares on its own node; to have a point measured "
                f"again, remove its folder in {folder.path / POINTS}"
            )
        )


def _by_reason(planned: PlannedSweep, why: Mapping[str, str]) -> Mapping[str, str]:
    """The numbers of the points in the table, by reason."""
    numbers: dict[str, list[str]] = {}
    for number, point in enumerate(planned.points, start=1):
        if point.id in why:
            numbers.setdefault(why[point.id], []).append(str(number))
    return {reason: f"point{'s' if len(some) > 1 else ''} {', '.join(some)}" for reason, some in numbers.items()}


def time_left(left: Estimate, some: Collection[Point]) -> str:
    """In words, with what is not known."""
    what = f"to run: {_count(len(some), 'point')} on {_count(left.starts, 'start')} of the deployment"
    if not some:
        return f"{what}; INVALID ones are measured again with --retry"
    if left.unknown_points == len(some):
        return f"{what}; the time is not known: none of them was measured before"
    return f"{what}; about {left.seconds / 60:.1f} min{_without(left)}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _without(left: Estimate) -> str:
    lacking = []
    if left.unknown_points:
        lacking.append(f"{left.unknown_points} points of a work and load that was never measured")
    if left.unknown_starts:
        lacking.append("the starts")
    return f", without {' and '.join(lacking)}" if lacking else ""
