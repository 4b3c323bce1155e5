"""Verbs over many benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

verbs = typer.Typer()


@verbs.command()
def sweep(
    file: Annotated[Path, typer.Argument(metavar="SWEEP", help="The sweep file (YAML).", show_default=False)],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the points, their order and the estimated time.")
    ] = False,
    retry: Annotated[bool, typer.Option("--retry", help="Measure points that are INVALID again.")] = False,
    python: Annotated[
        str | None,
        typer.Option("--python", help="An interpreter with vLLM for the client vllm; else the engines' own."),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="The folder of the tokenizer; else that of the model.")
    ] = None,
    limit: Annotated[float, typer.Option("--limit", min=1, help="Seconds for each run of the client.")] = 1800.0,
) -> None:
    """Measure every point of a sweep file on this machine: lists over keys of a recipe, workloads and loads.

    A deployment is started once for all of its points. A point that was measured is not measured again: the same
    command goes on after a crash. Exit 12 when a point is INVALID: docs/guides/sweep.md has the format.
    """
    from pdserve.cli.bench.sweep import run
    from pdserve.sweep.run import SweepOptions

    run(file, SweepOptions(python, tokenizer, limit), dry=dry_run, retry=retry)


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
