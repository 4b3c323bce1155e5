"""`pdserve compare`"""

from __future__ import annotations

import json
import os
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pdserve.bench.compare import Comparison, FigureChange, compare
from pdserve.bench.result import BenchResult
from pdserve.bench.stored import read_result
from pdserve.cli.bench.pages import write_page
from pdserve.cli.bench.wide_console import wide_console
from pdserve.report.changes_picture import change_pictures
from pdserve.report.drawing import check_matplotlib
from pdserve.report.page import comparison_page
from pdserve.run.directory import home

_STYLES = {"real": "bold", "within noise": "dim", "not judged": "yellow"}


def run(a: str, b: str, *, as_json: bool, page: Path | None = None) -> None:
    """What differs first, then each figure. `page`: where it is written as HTML too."""
    root = home(os.environ)
    results = (read_result(root, a), read_result(root, b))
    comparison = compare(*results)
    if page is not None:
        _write_page(page, (a, b), results, comparison)
    if as_json:
        typer.echo(json.dumps(comparison.model_dump(mode="json"), indent=2))
        return
    out = wide_console()
    out.print(Text(f"A is {a}, B is {b}"))
    _show_differences(comparison, out)
    for line in comparison.left_out:
        out.print(Text(f"not compared: {line}", style="yellow"))
    for load in dict.fromkeys(change.load for change in comparison.changes):
        out.print(_table(load, [change for change in comparison.changes if change.load == load]))
    if any(change.judgement == "not judged" for change in comparison.changes):
        out.print(Text("not judged: noise is known from two repeats on each side on (pdserve bench --repeats 3)"))
    if not comparison.changes:
        out.print(Text("no load has valid measurements in both"))
    if page is not None:
        out.print(Text(f"page: {page}"))


def _write_page(
    page: Path, names: tuple[str, str], results: tuple[BenchResult, BenchResult], comparison: Comparison
) -> None:
    check_matplotlib()
    drawn = change_pictures(comparison)
    write_page(page, comparison_page(names, results, comparison, drawn), None, drawn, option="--html")


def _show_differences(comparison: Comparison, out: Console) -> None:
    if not comparison.differences:
        out.print(Text("the same versions, hardware and recipe"))
        return
    table = Table("what differs", "A", "B", header_style="bold")
    for each in comparison.differences:
        table.add_row(*(Text("-" if cell is None else cell) for cell in (each.what, each.a, each.b)))
    out.print(table)


def _table(load: str, changes: list[FigureChange]) -> Table:
    table = Table(title=load, header_style="bold")
    for column in ("figure", "A", "B", "change", "noise (99 %)", "judgement"):
        table.add_column(column)
    for each in changes:
        noise = "-" if each.noise_share is None else f"±{each.noise_share:.1%}"
        change = "-" if each.change is None else f"{each.change:+.1%}"
        # A change that may be noise is not shown as a figure that a reader could quote.
        shown = change if each.judgement == "real" else f"({change})"
        judgement = Text(each.shown, style=_STYLES[each.judgement])
        table.add_row(f"{each.figure}, {each.unit}", f"{each.a:.2f}", f"{each.b:.2f}", shown, noise, judgement)
    return table
