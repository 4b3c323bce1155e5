"""`pdserve sweep`: the plan, its points, arrays of Slurm. Apart from verbs/benches.py for a fast --help."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pdserve.cli.console import wide_console
from pdserve.errors import InvalidSweepError
from pdserve.operations.progress import ShownProgress
from pdserve.plan.sbatch import RenderedArray
from pdserve.reach.slurm import SlurmTask
from pdserve.run.directory import home
from pdserve.sweep.file import (
    PlannedSweep,
    Point,
    Variant,
    by_deployment,
    constant_settings,
    constant_work,
    letters,
    load_sweep,
    resolve,
    select_deployment,
    title_of_varied,
)
from pdserve.sweep.record import PointRecord, SweepFolder, records_in
from pdserve.sweep.run import (
    Estimate,
    SweepOptions,
    SweepRunner,
    estimate,
    is_measured_here,
    points_to_run,
    stale_points,
)
from pdserve.sweep.slurm import ArrayFollower, OnPoint, check_none_runs, list_unfinished, scripts, submit_arrays


def run_sweep(
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
    planned = whole if deployment is None else select_deployment(whole, deployment, os.environ)
    out = wide_console(stderr=dry and array is not None, goes_on=not dry)
    stale = stale_points(planned, folder, measured_here=array is None and is_measured_here(folder, os.environ))
    some = points_to_run(planned, folder, stale, retry=retry)
    former = list(records_in(folder.path).values())
    _show_points(planned, some, {record.id: record for record in former}, out)
    for why, numbers in _by_reason(planned, stale).items():
        out.print(Text(f"measured again: {numbers}: {why}", style="yellow"))
    out.print(Text(_time_left(estimate(some, former, planned.starts(some)), some)))

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
        SweepRunner(planned, root, folder, options, ShownProgress(), show).run(some)
    _conclude(whole, planned, folder, states, out)


def _conclude(
    whole: PlannedSweep,
    planned: PlannedSweep,
    folder: SweepFolder,
    states: Mapping[str, SlurmTask],
    out: Console,
) -> None:
    """Print what all tasks have measured so far, whichever of them ends last; then an error for what does not count."""
    records = [record for point in whole.points if (record := folder.read(point)) is not None]
    valid = sum(record.status == "VALID" for record in records)
    lacking = len(whole.points) - len(records)
    left = f", {lacking} not measured" if lacking else ""
    out.print(Text(f"{valid} of {len(whole.points)} points are VALID{left}: {folder.path}"))
    out.print(Text(f"next: pdserve report {folder.path}"))
    here = [record for record in records if record.id in {point.id for point in planned.points}]
    _raise_for_points(planned, here, list_unfinished(planned, folder, letters(whole.points), states), folder)


def _show_unfinished(planned: PlannedSweep, folder: SweepFolder, out: Console) -> None:
    for line in list_unfinished(planned, folder, letters(planned.points), {}):
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


STATUS_STYLES = {"VALID": "green", "INVALID": "bold red", "to run": ""}


def _show_points(
    planned: PlannedSweep, some: Collection[Point], former: Mapping[str, PointRecord], out: Console
) -> None:
    """Print what is the same at all points once, each deployment once, then a short row for each point."""
    points, name = planned.points, planned.loaded.sweep.name
    short, constant, work = letters(points), constant_settings(points), constant_work(points)
    out.print(Text(f"{name}: {len(points)} points on {len(short)} deployments, in their order", style="bold"))
    same = [*(f"{key}={value}" for key, value in constant), *work]
    if same:
        out.print(Text(f"the same at all points: {', '.join(same)}"))
    for deployment, letter in short.items():
        out.print(Text(f"{letter} {deployment.digest}: {title_of_varied(deployment, constant)}"))
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
    """Return the restarts by cause, of deployments with several points to run."""
    causes: dict[str, list[str]] = {}
    for deployment, letter in short.items():
        why = planned.start_for_each_point(deployment)
        if why is not None and sum(point.deployment == deployment for point in some) > 1:
            causes.setdefault(why, []).append(letter)
    return causes


def _by_reason(planned: PlannedSweep, why: Mapping[str, str]) -> Mapping[str, str]:
    """Return the numbers of the points in the table, by reason."""
    numbers: dict[str, list[str]] = {}
    for number, point in enumerate(planned.points, start=1):
        if point.id in why:
            numbers.setdefault(why[point.id], []).append(str(number))
    return {reason: f"point{'s' if len(some) > 1 else ''} {', '.join(some)}" for reason, some in numbers.items()}


def _time_left(left: Estimate, some: Collection[Point]) -> str:
    """Return the time that is left in words, with what is not known."""
    what = f"to run: {_count(len(some), 'point')} on {_count(left.starts, 'start')} of the deployment"
    if not some:
        return f"{what}; INVALID ones are measured again with --retry"
    if left.unknown_points == len(some):
        return f"{what}; the time is not known: none of them was measured before"
    return f"{what}; about {left.seconds / 60:.1f} min{_unknown_parts(left)}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _unknown_parts(left: Estimate) -> str:
    lacking = []
    if left.unknown_points:
        lacking.append(f"{left.unknown_points} points of a work and load that was never measured")
    if left.unknown_starts:
        lacking.append("the starts")
    return f", without {' and '.join(lacking)}" if lacking else ""


@dataclass(frozen=True)
class ArrayOptions:
    """Holds the options of --slurm."""

    at_once: int | None
    """Tasks at a time; None: as many as Slurm starts."""
    detach: bool
    """Return once it is submitted."""


def run_in_slurm(
    planned: PlannedSweep,
    some: Sequence[Point],
    former: Sequence[PointRecord],
    folder: SweepFolder,
    options: SweepOptions,
    array: ArrayOptions,
    *,
    dry: bool,
    retry: bool,
    out: Console,
    on_point: OnPoint,
) -> Mapping[str, SlurmTask] | None:
    """Submits what is missing, and follows it. The last state of each task; None: nothing was followed. `out`: with
    `dry` it is stderr, because the scripts go to stdout."""
    arrays = scripts(planned, some, words_of(planned.loaded.path, options, retry=retry), at_once=array.at_once)
    _show_tasks(planned, arrays, array.at_once, out)
    if dry:
        for each in arrays:
            typer.echo(each.script)
        return None
    if not arrays:
        return {}
    check_none_runs(folder)

    def show(line: str) -> None:
        out.print(Text(line))

    records = submit_arrays(arrays, folder, show, one_after_other=array.at_once is not None)
    if array.detach:
        show(f"next: pdserve sweep {planned.loaded.path} --dry-run | pdserve report {folder.path}")
        return None
    follower = ArrayFollower(planned, folder, records, show, on_point, {record.id: record for record in former})
    follower.until_over()
    return follower.states


def words_of(file: Path, options: SweepOptions, *, retry: bool) -> list[str]:
    """Return the sweep file and the options that each task is given. The tasks run in the submit folder, or in that of
    PDSERVE_REPOSITORY."""
    words = [str(file.absolute()), "--limit", f"{options.limit_seconds:g}"]
    if (python := options.python) is not None:
        words += ["--python", str(Path(python).absolute()) if "/" in python else python]
    if (tokenizer := options.tokenizer) is not None:
        # One that is no path here is a name at Hugging Face, which has a slash too.
        words += ["--tokenizer", str(Path(tokenizer).absolute()) if Path(tokenizer).exists() else tokenizer]
    return [*words, *(["--retry"] if retry else [])]


def _show_tasks(planned: PlannedSweep, arrays: Sequence[RenderedArray], at_once: int | None, out: Console) -> None:
    short = {deployment.digest: letter for deployment, letter in letters(planned.points).items()}
    for number, each in enumerate(arrays, start=1):
        tasks = ", ".join(f"{place} = {short[member.id]}" for place, member in enumerate(each.members))
        limit = "" if at_once is None else f", {min(at_once, len(each.members))} at a time"
        nodes = "1 node" if each.nodes == 1 else f"{each.nodes} nodes"
        out.print(Text(f"array {number} of {len(arrays)}, {nodes} a task{limit}: task {tasks}"))
