"""`pdserve sweep --slurm`"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console
from rich.text import Text

from pdserve.plan.render.sbatch_array import RenderedArray
from pdserve.reach.slurm_array import SlurmTask
from pdserve.sweep.described import letters
from pdserve.sweep.estimate import array_seconds, estimate
from pdserve.sweep.points import Point
from pdserve.sweep.record import PointRecord, SweepFolder
from pdserve.sweep.resolve import PlannedSweep
from pdserve.sweep.run import SweepOptions
from pdserve.sweep.slurm import ArrayFollower, OnPoint, check_none_runs, scripts, submit_arrays


@dataclass(frozen=True)
class ArrayOptions:
    """Of --slurm."""

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
    _show_tasks(planned, arrays, some, former, array.at_once, out)
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
    """The sweep file and the options that each task is given. The tasks run in the submit folder, or in that of
    PDSERVE_REPOSITORY."""
    words = [str(file.absolute()), "--limit", f"{options.limit_seconds:g}"]
    if (python := options.python) is not None:
        words += ["--python", str(Path(python).absolute()) if "/" in python else python]
    if (tokenizer := options.tokenizer) is not None:
        # One that is no path here is a name at Hugging Face, which has a slash too.
        words += ["--tokenizer", str(Path(tokenizer).absolute()) if Path(tokenizer).exists() else tokenizer]
    return [*words, *(["--retry"] if retry else [])]


def _show_tasks(
    planned: PlannedSweep,
    arrays: Sequence[RenderedArray],
    some: Sequence[Point],
    former: Sequence[PointRecord],
    at_once: int | None,
    out: Console,
) -> None:
    short = {deployment.digest: letter for deployment, letter in letters(planned.points).items()}
    total, unknown = 0.0, False
    for number, each in enumerate(arrays, start=1):
        parts = [[point for point in some if point.deployment.digest == member.id] for member in each.members]
        estimates = [estimate(part, former, planned.starts(part)) for part in parts]
        seconds = array_seconds(estimates, at_once)
        # One after the other where there is a limit, else beside each other.
        total = total + seconds if at_once is not None else max(total, seconds)
        unknown = unknown or any(left.unknown_points or left.unknown_starts for left in estimates)
        tasks = ", ".join(f"{place} = {short[member.id]}" for place, member in enumerate(each.members))
        limit = "" if at_once is None else f", {min(at_once, len(each.members))} at a time"
        nodes = "1 node" if each.nodes == 1 else f"{each.nodes} nodes"
        out.print(Text(f"array {number} of {len(arrays)}, {nodes} a task{limit}: task {tasks}"))
    if arrays:
        about = f"about {total / 60:.1f} min" if total else "not known"
        lacking = ", without what was never measured" if unknown and total else ""
        out.print(Text(f"time of the arrays, once their tasks run: {about}{lacking}"))
