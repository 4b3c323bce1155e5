"""Verbs that put measurements beside each other: `compare`, `report`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdserve.cli.options import JsonOption
from pdserve.cli.output import VerbOutput, table
from pdserve.errors import StateError

if TYPE_CHECKING:
    from rich.table import Table

    from pdserve.report.page import Picture
    from pdserve.sweep.compare import Comparison, FigureChange

verbs = typer.Typer()


@verbs.command()
def compare(
    a: Annotated[
        str, typer.Argument(metavar="A", help="A result of bench: its id, folder or file; or a sweep's folder.")
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one of the same kind.")],
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Also write it as a page of one file.", show_default=False),
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Compare two benchmarks: versions, hardware, recipe; then each figure, with the noise over repeats.

    Of two sweeps, each point of one beside the point of the same settings of the other. A change within the noise is
    shown in parentheses and is not called real. INVALID repeats are left out. The page needs the extra `report`.
    """
    comparison, deployments = _compared(a, b)
    if html is not None:
        from pdserve.report.page import check_matplotlib, comparison_page

        check_matplotlib()
        write_page(html, comparison_page((a, b), deployments, comparison), None, [], option="--html")
    if json_:
        typer.echo(json.dumps(comparison.model_dump(mode="json"), indent=2))
        return
    out = VerbOutput()
    out.line(f"A is {a}, B is {b}")
    _show_differences(comparison, out)
    for line in comparison.left_out:
        out.line(f"not compared: {line}", "yellow")
    for point in comparison.points:
        out.table(changes_table(f"{point.letter}: {point.title}", point.changes))
        out.line(f"{point.letter}: {point.verdict}")
    if any(change.judgement == "not judged" for point in comparison.points for change in point.changes):
        out.line("not judged: noise is known from two repeats on each side on (pdserve bench --repeats 3)")
    if comparison.points:
        out.line(comparison.verdict, "bold")
    else:
        out.line("no load has valid measurements in both")
    if html is not None:
        out.line(f"page: {html}")


def _compared(a: str, b: str) -> tuple[Comparison, Sequence[str]]:
    """Compare two sweeps, or two results of bench; and name their deployments."""
    from pdserve.bench.result import read_result
    from pdserve.run.directory import home
    from pdserve.sweep.compare import compare as compare_results
    from pdserve.sweep.compare import compare_sweeps, is_sweep, read_sweep

    sweeps = [is_sweep(Path(each)) for each in (a, b)]
    if all(sweeps):
        points = read_sweep(Path(a)), read_sweep(Path(b))
        comparison = compare_sweeps(*points)
        results = [point.result for side in points for point in side if point.result is not None]
    elif any(sweeps):
        raise StateError(
            f"{a if sweeps[0] else b} is a sweep, and {b if sweeps[0] else a} is not",
            todo="compare two sweeps, or two results of bench: those of a sweep are in points/POINT/ATTEMPT/",
        )
    else:
        results = [read_result(home(os.environ), each) for each in (a, b)]
        comparison = compare_results(*results)
    return comparison, list(dict.fromkeys(result.provenance.deployment for result in results))


def _show_differences(comparison: Comparison, out: VerbOutput) -> None:
    if not comparison.differences:
        out.line("the same versions, hardware and recipe")
        return
    somewhere = any(each.points for each in comparison.differences)
    rows = []
    for each in comparison.differences:
        where = "all" if len(each.points) in (0, len(comparison.points)) else ", ".join(each.points)
        cells = ("-" if cell is None else cell for cell in (each.what, each.a, each.b))
        rows.append((*cells, *([where] if somewhere else [])))
    out.table(table(("what differs", "A", "B", *(["points"] if somewhere else [])), rows))


_STYLES = {"real": "bold", "within noise": "dim", "not judged": "yellow"}


def changes_table(title: str, changes: Sequence[FigureChange]) -> Table:
    """Return the table of all changes. A change that may be noise is in parentheses. What nothing was counted of on
    both sides is named below."""
    from rich.text import Text

    from pdserve.sweep.compare import shown_groups, uncounted_figures

    made = table(("figure", "A", "B", "change", "noise (99 %)", "judgement"), (), title=title)
    for group, its_changes in shown_groups(changes).items():
        made.add_row(Text(group, style="italic"))
        for each in its_changes:
            noise = "-" if each.noise_share is None else f"±{each.noise_share:.1%}"
            change = "-" if each.change is None else f"{each.change:+.1%}"
            # It is not shown as a figure that a reader could quote.
            shown = change if each.judgement == "real" else f"({change})"
            judgement = Text(each.shown, style=_STYLES[each.judgement])
            made.add_row(f"  {each.figure}, {each.unit}", f"{each.a:.2f}", f"{each.b:.2f}", shown, noise, judgement)
        made.add_section()
    if nothing := uncounted_figures(changes):
        made.caption = f"0 on both sides: {', '.join(nothing)}"
    return made


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
    from pdserve.report.page import check_matplotlib, report_page
    from pdserve.report.page import pictures as draw_pictures
    from pdserve.report.rows import read_report

    check_matplotlib()
    report = read_report(folders)
    drawn = draw_pictures(report)
    write_page(out, report_page(report, drawn), pictures, drawn, option="--out")
    typer.echo(f"{out}: {len(report.rows)} rows, {report.invalid} INVALID, {len(drawn)} pictures")


def write_page(out: Path, text: str, pictures_folder: Path | None, drawn: Sequence[Picture], *, option: str) -> None:
    """Write a page and its pictures. `option`: the one of the command line that names the page. Raises StateError."""
    try:
        out.write_text(text, encoding="utf-8")
        if pictures_folder is not None:
            pictures_folder.mkdir(parents=True, exist_ok=True)
            for each in drawn:
                each.save(pictures_folder)
    except OSError as error:
        raise StateError(
            "the page cannot be written",
            where=str(error.filename or out),
            cause=error.strerror or str(error),
            todo=f"name a file in a folder that you can write to: {option} FILE",
        ) from None
