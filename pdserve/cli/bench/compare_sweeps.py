"""`pdserve compare` of two sweeps"""

from __future__ import annotations

import json
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pdserve.cli.bench.changes_table import changes_table
from pdserve.cli.bench.pages import write_page
from pdserve.cli.bench.wide_console import wide_console
from pdserve.report.changes_picture import pictures_of
from pdserve.report.drawing import check_matplotlib
from pdserve.report.page import sweep_comparison_page
from pdserve.sweep.compare import MeasuredPoint, SweepComparison, compare_sweeps, read_sweep


def run_sweeps(a: Path, b: Path, *, as_json: bool, page: Path | None = None) -> None:
    """What differs first, then points that are not compared, then each figure of each point that both have."""
    points = read_sweep(a), read_sweep(b)
    comparison = compare_sweeps(*points)
    if page is not None:
        _write_page(page, (str(a), str(b)), points, comparison)
    if as_json:
        typer.echo(json.dumps(comparison.model_dump(mode="json"), indent=2))
        return
    out = wide_console()
    out.print(Text(f"A is {a}, B is {b}"))
    _show_differences(comparison, out)
    for line in comparison.unmatched:
        out.print(Text(f"not compared: {line}", style="yellow"))
    for pair in comparison.pairs:
        for line in pair.left_out:
            out.print(Text(f"not compared: {pair.letter}: {line}", style="yellow"))
        if pair.changes:
            out.print(changes_table(f"{pair.letter}: {pair.title}", pair.changes))
        out.print(Text(f"{pair.letter}: {pair.verdict}"))
    out.print(Text(comparison.verdict, style="bold"))
    if page is not None:
        out.print(Text(f"page: {page}"))


def _show_differences(comparison: SweepComparison, out: Console) -> None:
    if not comparison.differences:
        out.print(Text("the same versions, hardware and recipes" if comparison.pairs else "they share no point"))
        return
    table = Table("what differs", "A", "B", "points", header_style="bold")
    for each in comparison.differences:
        cells = (each.difference.what, each.difference.a, each.difference.b)
        where = "all" if len(each.points) == len(comparison.pairs) else ", ".join(each.points)
        table.add_row(*(Text("-" if cell is None else cell) for cell in cells), where)
    out.print(table)


def _write_page(
    page: Path,
    names: tuple[str, str],
    points: tuple[tuple[MeasuredPoint, ...], ...],
    comparison: SweepComparison,
) -> None:
    check_matplotlib()
    results = [point.result for side in points for point in side if point.result is not None]
    deployments = list(dict.fromkeys(result.provenance.deployment for result in results))
    drawn = {pair.letter: pictures_of(pair.changes, f"changes-{pair.letter}") for pair in comparison.pairs}
    write_page(page, sweep_comparison_page(names, deployments, comparison, drawn), None, [], option="--html")
