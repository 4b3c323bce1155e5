"""`pdserve compare` and `report`: tables and pages. Apart from verbs/benches.py for a fast --help."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pdserve.bench.result import read_result
from pdserve.cli.console import wide_console
from pdserve.errors import StateError
from pdserve.report.page import Picture, check_matplotlib, comparison_page, pictures, report_page
from pdserve.report.rows import read_report
from pdserve.run.directory import home
from pdserve.sweep.compare import (
    Comparison,
    FigureChange,
    compare,
    compare_sweeps,
    is_sweep,
    read_sweep,
    shown_groups,
    uncounted_figures,
)


def run_compare(a: str, b: str, *, as_json: bool, page: Path | None = None) -> None:
    """Print what differs, then what is not compared, then each figure of each load or point that both have. `page`:
    where it is written as HTML too."""
    comparison, deployments = _compared(a, b)
    if page is not None:
        check_matplotlib()
        write_page(page, comparison_page((a, b), deployments, comparison), None, [], option="--html")
    if as_json:
        typer.echo(json.dumps(comparison.model_dump(mode="json"), indent=2))
        return
    out = wide_console()
    out.print(Text(f"A is {a}, B is {b}"))
    _show_differences(comparison, out)
    for line in comparison.left_out:
        out.print(Text(f"not compared: {line}", style="yellow"))
    for point in comparison.points:
        out.print(changes_table(f"{point.letter}: {point.title}", point.changes))
        out.print(Text(f"{point.letter}: {point.verdict}"))
    if any(change.judgement == "not judged" for point in comparison.points for change in point.changes):
        out.print(Text("not judged: noise is known from two repeats on each side on (pdserve bench --repeats 3)"))
    if comparison.points:
        out.print(Text(comparison.verdict, style="bold"))
    else:
        out.print(Text("no load has valid measurements in both"))
    if page is not None:
        out.print(Text(f"page: {page}"))


def _compared(a: str, b: str) -> tuple[Comparison, Sequence[str]]:
    """Compare two sweeps, or two results of bench; and name their deployments."""
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
        comparison = compare(*results)
    return comparison, list(dict.fromkeys(result.provenance.deployment for result in results))


def _show_differences(comparison: Comparison, out: Console) -> None:
    if not comparison.differences:
        out.print(Text("the same versions, hardware and recipe"))
        return
    somewhere = any(each.points for each in comparison.differences)
    table = Table("what differs", "A", "B", *(["points"] if somewhere else []), header_style="bold")
    for each in comparison.differences:
        cells = (each.what, each.a, each.b)
        where = "all" if len(each.points) in (0, len(comparison.points)) else ", ".join(each.points)
        table.add_row(*(Text("-" if cell is None else cell) for cell in cells), *([where] if somewhere else []))
    out.print(table)


_STYLES = {"real": "bold", "within noise": "dim", "not judged": "yellow"}


def changes_table(title: str, changes: Sequence[FigureChange]) -> Table:
    """Return the table of all changes. A change that may be noise is in parentheses. What nothing was counted of on
    both sides is named below."""
    table = Table(title=title, header_style="bold")
    for column in ("figure", "A", "B", "change", "noise (99 %)", "judgement"):
        table.add_column(column)
    for group, its_changes in shown_groups(changes).items():
        table.add_row(Text(group, style="italic"))
        for each in its_changes:
            noise = "-" if each.noise_share is None else f"±{each.noise_share:.1%}"
            change = "-" if each.change is None else f"{each.change:+.1%}"
            # It is not shown as a figure that a reader could quote.
            shown = change if each.judgement == "real" else f"({change})"
            judgement = Text(each.shown, style=_STYLES[each.judgement])
            table.add_row(f"  {each.figure}, {each.unit}", f"{each.a:.2f}", f"{each.b:.2f}", shown, noise, judgement)
        table.add_section()
    if nothing := uncounted_figures(changes):
        table.caption = f"0 on both sides: {', '.join(nothing)}"
    return table


def run_report(folders: Sequence[Path], out: Path, pictures_folder: Path | None) -> None:
    """Write the page of these folders, and their pictures. Raises PreflightError without matplotlib, StateError for
    folders without results and files not to be written."""
    check_matplotlib()
    report = read_report(folders)
    drawn = pictures(report)
    write_page(out, report_page(report, drawn), pictures_folder, drawn, option="--out")
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
