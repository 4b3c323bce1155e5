"""Verbs over many benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdserve.cli.options import (
    USUAL_LIMIT,
    ClientPythonOption,
    LimitOption,
    ThisMachineOption,
    TokenizerOption,
)

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
    from pdserve.cli.bench.sweep import run
    from pdserve.cli.bench.sweep_slurm import ArrayOptions
    from pdserve.sweep.run import SweepOptions

    for option, typed in {"--at-once": at_once is not None, "--detach": detach}.items():
        if typed and not slurm:
            raise typer.BadParameter(f"{option} belongs to --slurm")
    for option, typed in {"--only": deployment is not None, "--this-machine": this_machine}.items():
        if typed and slurm:
            raise typer.BadParameter(
                f"--slurm submits the deployments as tasks, {option} runs here: give one of the two"
            )
    run(
        file,
        SweepOptions(python, tokenizer, limit, this_machine),
        dry=dry_run,
        retry=retry,
        deployment=deployment,
        array=ArrayOptions(at_once, detach) if slurm else None,
    )


@verbs.command()
def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER...", help="Of sweeps and of results of bench.", show_default=False)
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The page.")] = Path("report.html"),
    pictures: Annotated[
        Path | None, typer.Option("--pictures", metavar="FOLDER", help="Also write each picture as PNG and SVG.")
    ] = None,
) -> None:
    """Write results of sweeps and benchmarks as a page of one file: provenance, pictures, figures, verdicts.

    An INVALID measurement is marked in every table and picture, and no curve passes through it. The pictures need
    matplotlib (extra `report`).
    """
    from pdserve.cli.bench.report import run

    run(folders, out, pictures)
