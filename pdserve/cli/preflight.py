"""`pdserve preflight`. Apart from verbs/recipe.py for a fast --help."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pdserve.cli.options import check_place_options
from pdserve.errors import PreflightError, StateError
from pdserve.operations.current_run import find_running
from pdserve.operations.look import Destination, choose_destination, look
from pdserve.operations.plan_recipe import load, recipe_words
from pdserve.operations.size import find_crossings
from pdserve.preflight.container_images import Report
from pdserve.preflight.fabric import Wish, find_untried
from pdserve.preflight.finding import Finding, Status, failures, find_warnings
from pdserve.printable import printable
from pdserve.recipe.load.loader import LoadedRecipe
from pdserve.recipe.model import Recipe
from pdserve.run.directory import home

_ORDER: tuple[Status, ...] = ("failed", "warning", "unknown", "ok")
_STYLES = {"failed": "bold red", "warning": "yellow", "unknown": "cyan", "ok": "green"}


def run_preflight(
    recipe: Path,
    set_: Sequence[str],
    unset: Sequence[str],
    *,
    as_json: bool,
    cluster: Path | None = None,
    this_machine: bool = False,
    fabric: bool = False,
    min_gbps: float | None = None,
) -> None:
    """Prints what every node has and lacks; starts nothing. Exit 3 when a check has failed."""
    check_place_options(cluster, this_machine=this_machine)
    loaded = load(recipe, set_, unset)
    there = choose_destination(loaded, cluster, this_machine=this_machine, words=recipe_words(recipe, set_, unset))
    for warning in there.warnings:
        typer.echo(printable(f"warning: {warning}"), err=True)
    all_findings = find_all(loaded, there, _progress, fabric=fabric, min_gbps=min_gbps)
    findings = sorted(all_findings, key=lambda finding: _ORDER.index(finding.status))
    if as_json:
        typer.echo(json.dumps([finding.model_dump() for finding in findings], indent=2))
    elif sys.stdout.isatty():
        Console().print(_table(findings, loaded))
        typer.echo(_summary(findings))
    else:
        for line in _lines(findings, loaded):
            typer.echo(line)
    if failures(findings):
        raise typer.Exit(PreflightError.exit_code)


def _progress(line: str) -> None:
    typer.echo(printable(line), err=True)


def _table(findings: Iterable[Finding], loaded: LoadedRecipe) -> Table:
    table = Table("node", "check", "", "value", "need", "fix", header_style="bold")
    for finding in _printable_findings(findings, loaded):
        value = "\n".join((finding.value, *finding.evidence))
        status = Text(finding.status, style=_STYLES[finding.status])
        table.add_row(
            Text(finding.node), Text(finding.check), status, Text(value), Text(finding.need), Text(finding.fix or "")
        )
    return table


def _lines(findings: Sequence[Finding], loaded: LoadedRecipe) -> Iterator[str]:
    for finding in _printable_findings(findings, loaded):
        yield finding.line()
        yield from (f"  | {line}" for line in finding.evidence)
    yield _summary(findings)


def _printable_findings(findings: Iterable[Finding], loaded: LoadedRecipe) -> Iterator[Finding]:
    """Yield findings as a terminal may have them: commands of other users' processes and lines of logs are
    among them."""
    for finding in _collapse_findings(findings):
        texts = {"node": finding.node, "value": _value(finding, loaded), "need": finding.need, "fix": finding.fix}
        shown = {name: None if text is None else printable(text) for name, text in texts.items()}
        yield finding.model_copy(update={**shown, "evidence": tuple(map(printable, finding.evidence))})


def _value(finding: Finding, loaded: LoadedRecipe) -> str:
    """Return a finding's value with the place that asks for it: file and line for a key of the recipe."""
    where = finding.where
    if where is not None and where.partition(".")[0] in Recipe.model_fields:
        where = loaded.locate(where)
    return f"{where}: {finding.value}" if where else finding.value


def _collapse_findings(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield findings; what is well on several nodes takes one row a check."""
    well: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.status == "ok":
            well.setdefault(finding.check, []).append(finding)
        else:
            yield finding
    for same in well.values():
        first = same[0]
        if len({finding.node for finding in same}) == 1:
            yield from same
        else:
            value = first.value if len({finding.value for finding in same}) == 1 else f"{first.value}, ..."
            yield first.model_copy(update={"node": f"{len(same)} nodes", "value": value})


def _summary(findings: Sequence[Finding]) -> str:
    counts = {status: sum(finding.status == status for finding in findings) for status in reversed(_ORDER)}
    parts = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    return f"{len(findings)} checks: {parts or 'nothing to check'}"


def find_all(
    loaded: LoadedRecipe, there: Destination, report: Report, *, fabric: bool = False, min_gbps: float | None = None
) -> tuple[Finding, ...]:
    """Look for everything that a start would fail of, and return all findings. `report` gets lines while an image is
    fetched. `fabric`: also of transfers between the nodes, which must reach `min_gbps` (None: what the recipe has).

    Raises StateError where the deployment runs: its ports and its memory are its own, and every check would blame it;
    and as `look`.
    """
    name = loaded.recipe.name
    if find_running(home(os.environ), name) is not None:
        raise StateError(
            f"{name} is running",
            cause="preflight looks for what a start from nothing needs, and the deployment has it",
            todo=f"pdserve status {name}; pdserve up RECIPE checks what it would change",
        )
    recipe = loaded.recipe
    least = recipe.fabric.min_gbps if min_gbps is None else min_gbps
    wish = Wish(python=recipe.engine.python, min_gbps=least, rails=True) if fabric else None
    seen = look(loaded, there.machines, None, report=report, fabric=wish)
    plan = seen.planned.plan
    here_only = find_untried(plan) if fabric and there.machines is None else None
    return (*find_warnings(plan), *find_crossings(seen.planned), *seen.findings, *([here_only] if here_only else []))
