"""A report or a comparison as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.bench.compare import Comparison, FigureChange, shown_groups, uncounted_figures
from pdserve.bench.result import BenchResult
from pdserve.report.pictures import Picture, shares_of_caches
from pdserve.report.rows import LACKING, STAGES, ReportContents, ReportRow, prompt_sources, provenance_view, stages
from pdserve.sweep.compare import SweepComparison

OVERVIEW = ("TTFT p50", "TTFT p99", "ITL p50", "E2E mean", "output")
"""Figures of the table of all points; each point has all of them."""


@dataclass(frozen=True)
class _Why:
    check: str
    text: str
    invalid: bool


def report_page(report: ReportContents, drawn: Sequence[Picture]) -> str:
    """Return provenance, pictures, what does not count, figures."""
    deployments = sorted({about.deployment for _, about in report.provenance})
    return _rendered(
        "report.html.j2",
        title=f"{', '.join(deployments) or 'nothing measured'}: benchmark report",
        report=report,
        about=provenance_view([(report.letter(series), about) for series, about in report.provenance]),
        deployments=deployments,
        counts={
            series: (len(rows), sum(not row.valid for row in rows))
            for series in report.names
            if (rows := [row for row in report.rows if row.series == series])
        },
        drawn=_figures(drawn),
        why=_reasons(report),
        hits=_hits,
        stages=stages,
        stage_names=STAGES,
    )


def comparison_page(
    names: tuple[str, str],
    results: tuple[BenchResult, BenchResult],
    comparison: Comparison,
    drawn: Sequence[Picture],
) -> str:
    """Write the page of a comparison: what differs first, then what is not compared, then each figure. `names`: what
    the results are called."""
    a, b = names
    loads: dict[str, list[FigureChange]] = {}
    for change in comparison.changes:
        loads.setdefault(change.load, []).append(change)
    measured = [each for result in results for each in result.measurements]
    return _rendered(
        "comparison.html.j2",
        title=f"{a} and {b}: comparison of benchmarks",
        a=a,
        b=b,
        deployments=list(dict.fromkeys(result.provenance.deployment for result in results)),
        verdict=comparison.verdict,
        measured=len(measured),
        invalid=sum(not each.verdict.valid for each in measured),
        lacking=LACKING,
        comparison=comparison,
        about=provenance_view(list(zip(("A", "B"), (result.provenance for result in results), strict=True))),
        loads=loads,
        drawn=_figures(drawn),
    )


def sweep_comparison_page(
    names: tuple[str, str],
    deployments: Sequence[str],
    comparison: SweepComparison,
    drawn: Mapping[str, Sequence[Picture]],
) -> str:
    """Write the page of two sweeps: what differs first, then what is not compared, then each point. `drawn`: by the
    letter of a point."""
    a, b = names
    return _rendered(
        "sweep_comparison.html.j2",
        title=f"{a} and {b}: comparison of sweeps",
        a=a,
        b=b,
        deployments=deployments,
        lacking=LACKING,
        comparison=comparison,
        overview=OVERVIEW,
        drawn={letter: _figures(some) for letter, some in drawn.items()},
    )


def _rendered(template: str, **values: Any) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(groups=shown_groups, uncounted_figures=uncounted_figures)
    return environment.get_template(template).render(values)


def _figures(drawn: Sequence[Picture]) -> list[dict[str, object]]:
    from markupsafe import Markup

    # Not a text of others: matplotlib has written it, and has escaped what it drew.
    return [
        {
            "svg": Markup(each.svg),  # noqa: S704
            "note": each.note,
            "list": each.lines,
            "minor": each.minor,
            "timeline": each.name.startswith("timeline"),
        }
        for each in drawn
    ]


def _reasons(report: ReportContents) -> dict[_Why, list[str]]:
    """Return each reason once, with the rows that have it. INVALID ones first."""
    found: dict[_Why, list[str]] = {}
    for invalid in (True, False):
        for row in report.rows:
            for reason in row.reasons if invalid else row.unchecked:
                repeat = "" if row.repeat is None else f" #{row.repeat + 1}"
                where = found.setdefault(_Why(reason.check, reason.text, invalid), [])
                where.append(f"{report.letter(row.series)}, {row.load.title}{repeat}")
    return found


def _hits(row: ReportRow) -> str:
    """Show the hits as counted, and in theory."""
    share = None if row.measurement is None else shares_of_caches(prompt_sources(row.measurement))
    return ", ".join("-" if each is None else f"{each:.0f} %" for each in (share, row.theory))
