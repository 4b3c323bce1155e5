"""`pdserve sweep`"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path

from rich.console import Console as RichConsole
from rich.table import Table
from rich.text import Text

from pdserve.cli.bench.wide_console import wide_console
from pdserve.cli.console import Console
from pdserve.errors import InvalidSweepError
from pdserve.run.directory import home
from pdserve.sweep.estimate import Estimate, estimate
from pdserve.sweep.file import load_sweep
from pdserve.sweep.points import Point, by_deployment
from pdserve.sweep.record import PointRecord, SweepFolder, records_in
from pdserve.sweep.resolve import PlannedSweep, resolve
from pdserve.sweep.run import SweepOptions, SweepRunner, to_run

_STYLES = {"VALID": "green", "INVALID": "bold red", "to run": ""}


def run(file: Path, options: SweepOptions, *, dry: bool, retry: bool) -> None:
    """Prints the plan, then a line for each point. Raises InvalidSweepError after the last one, when any is INVALID."""
    planned = resolve(load_sweep(file), os.environ)
    root = home(os.environ)
    folder = SweepFolder.of(root, planned.name, planned.loaded.sweep.name)
    out = wide_console()
    some = to_run(planned, folder, retry=retry)
    former = records_in(folder.path)
    _show_plan(planned, some, {record.id: record for record in former.values()}, out)
    out.print(Text(_time(estimate(some, list(former.values())), some)))
    if dry:
        return

    def show(point: Point, record: PointRecord) -> None:
        out.print(Text(f"{point.title}: {record.status}", style=_STYLES[record.status]))
        for reason in record.reasons:
            out.print(Text(f"  {reason.check}: {reason.text}"))

    SweepRunner(planned, root, folder, options, Console(), show).run(some)
    records = [record for point in planned.points if (record := folder.read(point)) is not None]
    valid = sum(record.status == "VALID" for record in records)
    out.print(Text(f"{valid} of {len(planned.points)} points are VALID: {folder.path}"))
    out.print(Text(f"next: pdserve report {folder.path}"))
    _raise_for_points(records, folder)


def _show_plan(
    planned: PlannedSweep, some: Collection[Point], former: Mapping[str, PointRecord], out: RichConsole
) -> None:
    table = Table(title=f"{planned.loaded.sweep.name}: points in their order", header_style="bold")
    for column in ("", "deployment", "work", "load", "repeats", "state"):
        table.add_column(column)
    number = 0
    for deployment, its_points in by_deployment(planned.points):
        for place, point in enumerate(its_points):
            number += 1
            state = "to run" if point in some else former[point.id].status
            table.add_row(
                str(number),
                Text(deployment.title if place == 0 else '"'),
                point.work,
                point.load.title,
                str(point.workload.repeats),
                Text(state, style=_STYLES[state]),
            )
    out.print(table)
    distinct = len(planned.recipes)
    if distinct < planned.combinations:
        out.print(Text(f"{planned.combinations} combinations are {distinct} different recipes"))


def _time(left: Estimate, some: Collection[Point]) -> str:
    starts = len(by_deployment(tuple(some)))
    what = f"to run: {len(some)} points on {starts} starts of the deployment"
    if not some:
        return f"{what}; INVALID ones are measured again with --retry"
    lacking = []
    if left.unknown_points:
        lacking.append(f"{left.unknown_points} points of a work and load that was never measured")
    if left.unknown_starts:
        lacking.append("the starts")
    if left.unknown_points == len(some):
        return f"{what}; the time is not known: none of them was measured before"
    return f"{what}; about {left.seconds / 60:.1f} min" + (f", without {' and '.join(lacking)}" if lacking else "")


def _raise_for_points(records: Collection[PointRecord], folder: SweepFolder) -> None:
    wrong = [record for record in records if record.status == "INVALID"]
    if not wrong:
        return
    raise InvalidSweepError(
        f"{len(wrong)} of {len(records)} points are INVALID",
        where=str(folder.path),
        cause="what was measured is not what was asked for, or nothing could be measured; each reason is below",
        todo="correct it, then the same command with --retry",
        evidence=tuple(
            f"{record.id}: {reason.check}: {reason.text.splitlines()[0]}"
            for record in wrong
            for reason in record.reasons
        ),
    )
