"""`pdserve compare`"""

from __future__ import annotations

import json
import os
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pdserve.bench.compare import Comparison, compare
from pdserve.bench.result import BenchResult
from pdserve.bench.stored import read_result, result_file
from pdserve.cli.bench.changes_table import changes_table
from pdserve.cli.bench.compare_sweeps import run_sweeps
from pdserve.cli.bench.pages import write_page
from pdserve.cli.bench.wide_console import wide_console
from pdserve.errors import StateError
from pdserve.report.attempts import judged, missing, point_of
from pdserve.report.changes_picture import change_pictures
from pdserve.report.drawing import check_matplotlib
from pdserve.report.page import comparison_page
from pdserve.run.directory import home
from pdserve.sweep.compare import is_sweep


def run(a: str, b: str, *, as_json: bool, page: Path | None = None) -> None:
    """What differs first, then each figure. `page`: where it is written as HTML too."""
    sweeps = [is_sweep(Path(each)) for each in (a, b)]
    if all(sweeps):
        run_sweeps(Path(a), Path(b), as_json=as_json, page=page)
        return
    if any(sweeps):
        raise StateError(
            f"{a if sweeps[0] else b} is a sweep, and {b if sweeps[0] else a} is not",
            todo="compare two sweeps, or two results of bench: those of a sweep are in points/POINT/ATTEMPT/",
        )
    root = home(os.environ)
    (ours, missing_a), (theirs, missing_b) = _read(root, a, "A"), _read(root, b, "B")
    results = (ours, theirs)
    compared = compare(*results)
    comparison = compared.model_copy(update={"left_out": (*missing_a, *missing_b, *compared.left_out)})
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
        out.print(changes_table(load, [change for change in comparison.changes if change.load == load]))
    if any(change.judgement == "not judged" for change in comparison.changes):
        out.print(Text("not judged: noise is known from two repeats on each side on (pdserve bench --repeats 3)"))
    if not comparison.changes:
        out.print(Text("no load has valid measurements in both"))
    else:
        out.print(Text(comparison.verdict, style="bold"))
    if page is not None:
        out.print(Text(f"page: {page}"))


def _read(root: Path, which: str, name: str) -> tuple[BenchResult, tuple[str, ...]]:
    """With the verdict of the sweep that has made it, if one has; and a line for repeats that it lacks."""
    result, record = read_result(root, which), point_of(result_file(root, which).parent)
    return judged(result, record), missing(name, result, record)


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
