"""A report as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from pdserve.report.rows import ReportContents, varied

_TEMPLATE = Path(__file__).with_name("page.html.j2")


def page(report: ReportContents, drawn: Sequence[Mapping[str, str]]) -> str:
    """`drawn`: title, note and svg of each picture."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    shared, differs = varied(report.provenance)
    recipes: dict[str, list[str]] = {}
    for name, about in report.provenance:
        recipes.setdefault(about.recipe, []).append(name)
    began = [about.began for _, about in report.provenance]
    times = [datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC") for at in sorted(began)]
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        report=report,
        shared=shared,
        differs=differs,
        recipes=recipes,
        times=times,
        clients=sorted({about.client for _, about in report.provenance}),
        deployments=sorted({about.deployment for _, about in report.provenance}),
        # Not a text of others: matplotlib has written it, and has escaped what it drew.
        drawn=[{**each, "svg": Markup(each["svg"])} for each in drawn],  # noqa: S704
    )
