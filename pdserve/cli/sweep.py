"""`pdserve sweep`: the plan, its points, arrays of Slurm."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdserve.cli.options import USUAL_LIMIT, ClientPythonOption, LimitOption, ThisMachineOption, TokenizerOption
from pdserve.cli.output import Cell, VerbOutput, table
from pdserve.errors import InvalidSweepError

if TYPE_CHECKING:
    from pdserve.plan.sbatch import RenderedArray
    from pdserve.reach.slurm import SlurmTask
    from pdserve.sweep.file import PlannedSweep, Point, Variant
    from pdserve.sweep.record import PointRecord, SweepFolder
    from pdserve.sweep.run import Estimate, SweepOptions
    from pdserve.sweep.slurm import OnPoint

verbs = typer.Typer()


@verbs.command()
def sweep(
    file: Annotated[Path, typer.Argument(metavar="SWEEP", help="The sweep file (YAML).", show_default=False)],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the points, their order and the estimated time.")
    ] = False,
    retry: Annotated[bool, typer.Option("--retry", help="Measure points that are INVALID again.")] = False,
    slurm: Annotated[
        bool,
        typer.Option("--slurm", help="Submit it to Slurm as a job array, a task for each deployment, and follow it."),
    ] = False,
    at_once: Annotated[
        int | None, typer.Option("--at-once", min=1, metavar="N", help="With --slurm: tasks that run at a time.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="With --slurm: return once it is submitted.")] = False,
    deployment: Annotated[
        str | None,
        typer.Option(
            "--only",
            metavar="ID",
            help="Only the points of this deployment, by the id that --dry-run prints; it gets a name of its own, so "
            "that others of the sweep can run beside it.",
        ),
    ] = None,
    this_machine: ThisMachineOption = False,
    python: ClientPythonOption = None,
    tokenizer: TokenizerOption = None,
    limit: LimitOption = USUAL_LIMIT,
) -> None:
    """Measure every point of a sweep file: lists over keys of a recipe, workloads and loads.

    It runs on this machine, inside a Slurm job on the job's nodes, with --slurm as job arrays. A deployment is started
    once for all of its points, or anew for each where only that empties its caches. A point that was measured is not
    measured again: the same command goes on after a crash. Exit 12 when a point is INVALID or was not measured:
    docs/guides/sweep.md has the format.
    """
    from pdserve.sweep.run import SweepOptions

    for option, typed in {"--at-once": at_once is not None, "--detach": detach}.items():
        if typed and not slurm:
            raise typer.BadParameter(f"{option} belongs to --slurm")
    for option, typed in {"--only": deployment is not None, "--this-machine": this_machine}.items():
        if typed and slurm:
            raise typer.BadParameter(
                f"--slurm submits the deployments as tasks, {option} runs here: give one of the two"
            )
    run_sweep(
        file,
        SweepOptions(python, tokenizer, limit, this_machine),
        dry=dry_run,
        retry=retry,
        deployment=deployment,
        array=ArrayOptions(at_once, detach) if slurm else None,
    )


def run_sweep(
    file: Path,
    options: SweepOptions,
    *,
    dry: bool,
    retry: bool,
    deployment: str | None = None,
    array: ArrayOptions | None = None,
) -> None:
    """Print the plan, then a line for each point. `deployment`: only the points of that one, which gets a name of its
    own; `array`: as arrays of Slurm. Raises InvalidSweepError after the last point, when any is INVALID or lacks."""
    from pdserve.operations.progress import ShownProgress
    from pdserve.run.directory import home
    from pdserve.sweep.file import load_sweep, resolve, select_deployment
    from pdserve.sweep.record import SweepFolder, records_in
    from pdserve.sweep.run import SweepRunner, estimate, is_measured_here, points_to_run, stale_points

    whole = resolve(load_sweep(file), os.environ)
    root = home(os.environ)
    folder = SweepFolder.of(root, whole.folder_name, whole.loaded.sweep.name)
    planned = whole if deployment is None else select_deployment(whole, deployment, os.environ)
    out = VerbOutput(stderr=dry and array is not None, goes_on=not dry)
    stale = stale_points(planned, folder, measured_here=array is None and is_measured_here(folder, os.environ))
    some = points_to_run(planned, folder, stale, retry=retry)
    former = list(records_in(folder.path).values())
    _show_points(planned, some, {record.id: record for record in former}, out)
    for why, numbers in _by_reason(planned, stale).items():
        out.line(f"measured again: {numbers}: {why}", "yellow")
    out.line(_time_left(estimate(some, former, planned.starts(some)), some))

    def show(point: Point, record: PointRecord) -> None:
        out.line(f"{point.title}: {record.status}", STATUS_STYLES[record.status])
        for reason in record.reasons:
            out.line(f"  {reason.check}: {reason.text}")

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
    out: VerbOutput,
) -> None:
    """Print what all tasks have measured so far, whichever of them ends last; then an error for what does not count."""
    from pdserve.sweep.file import letters
    from pdserve.sweep.slurm import list_unfinished

    records = [record for point in whole.points if (record := folder.read(point)) is not None]
    valid = sum(record.status == "VALID" for record in records)
    lacking = len(whole.points) - len(records)
    left = f", {lacking} not measured" if lacking else ""
    out.line(f"{valid} of {len(whole.points)} points are VALID{left}: {folder.path}")
    out.line(f"next: pdserve report {folder.path}")
    here = [record for record in records if record.id in {point.id for point in planned.points}]
    _raise_for_points(planned, here, list_unfinished(planned, folder, letters(whole.points), states), folder)


def _show_unfinished(planned: PlannedSweep, folder: SweepFolder, out: VerbOutput) -> None:
    from pdserve.sweep.file import letters
    from pdserve.sweep.slurm import list_unfinished

    for line in list_unfinished(planned, folder, letters(planned.points), {}):
        out.line(line, "yellow")


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
    planned: PlannedSweep, some: Collection[Point], former: Mapping[str, PointRecord], out: VerbOutput
) -> None:
    """Print each deployment once, then a short row for each point."""
    from pdserve.sweep.file import letters

    points, name = planned.points, planned.loaded.sweep.name
    short = letters(points)
    out.line(f"{name}: {len(points)} points on {len(short)} deployments, in their order", "bold")
    for deployment, letter in short.items():
        out.line(f"{letter} {deployment.digest}: {deployment.title}")
    for why, some_letters in _by_cause(planned, some, short).items():
        out.line(f"a new start before each point, to empty the caches of {', '.join(some_letters)}: {why}")
    rows: list[tuple[Cell, ...]] = []
    for number, point in enumerate(points, start=1):
        state = "to run" if point in some else former[point.id].status if point.id in former else "not run"
        cells = (str(number), short[point.deployment], point.work, point.load.title, str(point.workload.repeats))
        rows.append((*cells, (state, STATUS_STYLES.get(state, ""))))
    out.table(table(("", "deployment", "work", "load", "repeats", "state"), rows))
    if (distinct := len(planned.recipes)) < planned.combinations:
        out.line(f"{planned.combinations} combinations are {distinct} different recipes")


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
    out: VerbOutput,
    on_point: OnPoint,
) -> Mapping[str, SlurmTask] | None:
    """Submit what is missing, and follow it. Returns the last state of each task; None: nothing was followed. `out`:
    with `dry` it is stderr, because the scripts go to stdout."""
    from pdserve.sweep.slurm import ArrayFollower, check_none_runs, scripts, submit_arrays

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
        out.line(line)

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


def _show_tasks(planned: PlannedSweep, arrays: Sequence[RenderedArray], at_once: int | None, out: VerbOutput) -> None:
    from pdserve.sweep.file import letters

    short = {deployment.digest: letter for deployment, letter in letters(planned.points).items()}
    for number, each in enumerate(arrays, start=1):
        tasks = ", ".join(f"{place} = {short[member.id]}" for place, member in enumerate(each.members))
        limit = "" if at_once is None else f", {min(at_once, len(each.members))} at a time"
        nodes = "1 node" if each.nodes == 1 else f"{each.nodes} nodes"
        out.line(f"array {number} of {len(arrays)}, {nodes} a task{limit}: task {tasks}")
