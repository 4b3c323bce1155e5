"""`pdserve sweep`"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from rich.console import Console as RichConsole
from rich.text import Text

from pdserve.cli.bench.sweep_plan import STATUS_STYLES, show_plan, show_stale, time_left
from pdserve.cli.bench.sweep_slurm import ArrayOptions, run_in_slurm
from pdserve.cli.bench.wide_console import wide_console
from pdserve.cli.console import Console
from pdserve.errors import InvalidSweepError
from pdserve.reach.slurm_array import SlurmTask
from pdserve.run.directory import home
from pdserve.sweep.described import letters
from pdserve.sweep.estimate import estimate
from pdserve.sweep.file import load_sweep
from pdserve.sweep.points import Point
from pdserve.sweep.record import PointRecord, SweepFolder, records_in
from pdserve.sweep.resolve import PlannedSweep, only, resolve
from pdserve.sweep.run import SweepOptions, SweepRunner, to_run
from pdserve.sweep.slurm import unfinished
from pdserve.sweep.stale import is_measured_here, known_here, stale_points


def run(
    file: Path,
    options: SweepOptions,
    *,
    dry: bool,
    retry: bool,
    deployment: str | None = None,
    array: ArrayOptions | None = None,
) -> None:
    """Prints the plan, then a line for each point. `deployment`: only the points of that one, which gets a name of its
    own; `array`: as arrays of Slurm. Raises InvalidSweepError after the last point, when any is INVALID or lacks."""
    whole = resolve(load_sweep(file), os.environ)
    root = home(os.environ)
    folder = SweepFolder.of(root, whole.folder_name, whole.loaded.sweep.name)
    planned = whole if deployment is None else only(whole, deployment, os.environ)
    out = wide_console(stderr=dry and array is not None, goes_on=not dry)
    stale = stale_points(
        planned,
        folder,
        known_here(os.environ, this_machine=options.this_machine),
        measured_here=is_measured_here(folder, os.environ, array=array is not None),
    )
    some = to_run(planned, folder, stale.again, retry=retry)
    former = list(records_in(folder.path).values())
    show_plan(planned, some, {record.id: record for record in former}, out)
    show_stale(planned, stale, folder, out)
    out.print(Text(time_left(estimate(some, former, planned.starts(some)), some)))

    def show(point: Point, record: PointRecord) -> None:
        out.print(Text(f"{point.title}: {record.status}", style=STATUS_STYLES[record.status]))
        for reason in record.reasons:
            out.print(Text(f"  {reason.check}: {reason.text}"))

    states: Mapping[str, SlurmTask] = {}
    if array is not None:
        seen = run_in_slurm(planned, some, former, folder, options, array, dry=dry, retry=retry, out=out, on_point=show)
        if seen is None:
            _show_unfinished(planned, folder, out)
            return
        states = seen
    elif dry:
        _show_unfinished(planned, folder, out)
        return
    else:
        SweepRunner(planned, root, folder, options, Console(), show).run(some)
    again = {record.id: record for record in former if record.id in {point.id for point in some}}
    _conclude(whole, planned, folder, states, again, stale.again, out)


def _conclude(
    whole: PlannedSweep,
    planned: PlannedSweep,
    folder: SweepFolder,
    states: Mapping[str, SlurmTask],
    again: Mapping[str, PointRecord],
    stale: Collection[str],
    out: RichConsole,
) -> None:
    """What all tasks have measured so far, whichever of them ends last; then an error for what does not count. `again`:
    the former records of points that were to be measured again; `stale`: the ids of those that do not count as they
    were."""

    def stands(record: PointRecord) -> bool:
        return record.id not in stale or record != again.get(record.id)

    records = [record for point in whole.points if (record := folder.read(point)) is not None and stands(record)]
    valid = sum(record.status == "VALID" for record in records)
    lacking = len(whole.points) - len(records)
    left = f", {lacking} not measured" if lacking else ""
    out.print(Text(f"{valid} of {len(whole.points)} points are VALID{left}: {folder.path}"))
    out.print(Text(f"next: pdserve report {folder.path}"))
    here = [record for record in records if record.id in {point.id for point in planned.points}]
    _raise_for_points(planned, here, unfinished(planned, folder, letters(whole.points), states, again), folder)


def _show_unfinished(planned: PlannedSweep, folder: SweepFolder, out: RichConsole) -> None:
    for line in unfinished(planned, folder, letters(planned.points), {}):
        out.print(Text(line, style="yellow"))


def _raise_for_points(
    planned: PlannedSweep, records: Collection[PointRecord], lacking: Sequence[str], folder: SweepFolder
) -> None:
    wrong = [record for record in records if record.status == "INVALID"]
    missing = len(planned.points) - len(records)
    if not wrong and not missing:
        return
    what = [f"{len(wrong)} of {len(planned.points)} points are INVALID"] if wrong else []
    what += [f"{missing} of {len(planned.points)} points were not measured"] if missing else []
    todo = ["the same command with --retry measures INVALID points again" if wrong else "", _AGAIN if missing else ""]
    raise InvalidSweepError(
        ", ".join(what),
        where=str(folder.path),
        cause="what was measured is not what was asked for, or nothing could be measured; each reason is below",
        todo=f"correct it; {'; '.join(filter(None, todo))}",
        evidence=(
            *lacking,
            *(
                f"{record.id}: {reason.check}: {reason.text.splitlines()[0]}"
                for record in wrong
                for reason in record.reasons
            ),
        ),
    )


_AGAIN = "the same command runs what is missing"
