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

from pdserve.bench.compare import Comparison, FigureChange, compare, shown_groups, uncounted_figures
from pdserve.bench.result import BenchResult, read_result, result_file
from pdserve.cli.console import wide_console
from pdserve.errors import StateError
from pdserve.report.page import comparison_page, report_page, sweep_comparison_page
from pdserve.report.pictures import Picture, change_pictures, check_matplotlib, pictures, pictures_of
from pdserve.report.rows import add_objections, name_lacking_repeats, point_of, read_report
from pdserve.run.directory import home
from pdserve.sweep.compare import MeasuredPoint, SweepComparison, compare_sweeps, is_sweep, read_sweep


def run_compare(a: str, b: str, *, as_json: bool, page: Path | None = None) -> None:
    """Print what differs, then each figure. `page`: where it is written as HTML too."""
    sweeps = [is_sweep(Path(each)) for each in (a, b)]
    if all(sweeps):
        _compare_sweeps(Path(a), Path(b), as_json=as_json, page=page)
        return
    if any(sweeps):
        raise StateError(
            f"{a if sweeps[0] else b} is a sweep, and {b if sweeps[0] else a} is not",
            todo="compare two sweeps, or two results of bench: those of a sweep are in points/POINT/ATTEMPT/",
        )
    root = home(os.environ)
    (ours, missing_a), (theirs, missing_b) = _read_with_verdict(root, a, "A"), _read_with_verdict(root, b, "B")
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


def _read_with_verdict(root: Path, which: str, name: str) -> tuple[BenchResult, tuple[str, ...]]:
    """Read a result with the verdict of the sweep that has made it, if one has; and a line for repeats that it
    lacks."""
    result, record = read_result(root, which), point_of(result_file(root, which).parent)
    return add_objections(result, record), name_lacking_repeats(name, result, record)


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


def _compare_sweeps(a: Path, b: Path, *, as_json: bool, page: Path | None = None) -> None:
    """Print what differs first, then points that are not compared, then each figure of each point that both have."""
    points = read_sweep(a), read_sweep(b)
    comparison = compare_sweeps(*points)
    if page is not None:
        _write_sweep_page(page, (str(a), str(b)), points, comparison)
    if as_json:
        typer.echo(json.dumps(comparison.model_dump(mode="json"), indent=2))
        return
    out = wide_console()
    out.print(Text(f"A is {a}, B is {b}"))
    _show_sweep_differences(comparison, out)
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


def _show_sweep_differences(comparison: SweepComparison, out: Console) -> None:
    if not comparison.differences:
        out.print(Text("the same versions, hardware and recipes" if comparison.pairs else "they share no point"))
        return
    table = Table("what differs", "A", "B", "points", header_style="bold")
    for each in comparison.differences:
        cells = (each.difference.what, each.difference.a, each.difference.b)
        where = "all" if len(each.points) == len(comparison.pairs) else ", ".join(each.points)
        table.add_row(*(Text("-" if cell is None else cell) for cell in cells), where)
    out.print(table)


def _write_sweep_page(
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
