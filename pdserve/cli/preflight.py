"""`pdserve preflight`"""

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

from pdserve.candidates import Candidates
from pdserve.cli.plan_recipe import load, plan_for
from pdserve.cli.render import recipe_words
from pdserve.cli.where import candidates, look_here, look_once
from pdserve.errors import PreflightError, StateError
from pdserve.host import local_node
from pdserve.plan.model import Plan
from pdserve.preflight.finding import Finding, Status, failed, of_plan
from pdserve.recipe.loader import LoadedRecipe
from pdserve.recipe.model import Recipe
from pdserve.rundir import find, home, lives

_ORDER: tuple[Status, ...] = ("failed", "warning", "unknown", "ok")
_STYLES = {"failed": "bold red", "warning": "yellow", "unknown": "cyan", "ok": "green"}


def run(
    recipe: Path,
    set_: Sequence[str],
    unset: Sequence[str],
    *,
    as_json: bool,
    cluster: Path | None = None,
    this_machine: bool = False,
) -> None:
    """Prints what every node has and lacks; starts nothing. Exit 3 when a check has failed."""
    loaded = load(recipe, set_, unset)
    words = recipe_words(recipe, set_, unset)
    there, warnings = candidates(loaded, cluster, this_machine=this_machine, words=words)
    for warning in warnings:
        typer.echo(f"warning: {warning}", err=True)
    plan, found = here(loaded) if there is None else elsewhere(loaded, there)
    findings = sorted([*of_plan(plan), *found], key=lambda finding: _ORDER.index(finding.status))
    if as_json:
        typer.echo(json.dumps([finding.model_dump() for finding in findings], indent=2))
    elif sys.stdout.isatty():
        Console().print(_table(findings, loaded))
        typer.echo(_summary(findings))
    else:
        for line in _lines(findings, loaded):
            typer.echo(line)
    if failed(findings):
        raise typer.Exit(PreflightError.exit_code)


def here(loaded: LoadedRecipe) -> tuple[Plan, Sequence[Finding]]:
    """The plan for this machine alone, and what is found here."""
    _refuse_running(loaded.recipe.name)
    node = local_node(loaded.recipe.platform)
    planned = plan_for(loaded, [node], run_dir="RUN_DIR", run_id="RUN_ID")
    return planned.plan, look_here(planned)


def elsewhere(loaded: LoadedRecipe, there: Candidates) -> tuple[Plan, Sequence[Finding]]:
    """The plan for all nodes of a job or of a cluster file, and what is found there."""
    _refuse_running(loaded.recipe.name)
    seen = look_once(loaded, there)
    return seen.planned.plan, seen.findings


def _refuse_running(name: str) -> None:
    """Its ports and its memory are its own: every check would blame it."""
    try:
        run = find(home(os.environ), name)
        running = lives(run, run.read_state())
    except StateError:
        return
    if running:
        raise StateError(
            f"{name} is running",
            cause="preflight looks for what a start from nothing needs, and the deployment has it",
            todo=f"pdserve status {name}; pdserve up RECIPE checks what it would change",
        )


def _table(findings: Iterable[Finding], loaded: LoadedRecipe) -> Table:
    table = Table("node", "check", "", "value", "need", "fix", header_style="bold")
    for finding in _collapsed(findings):
        value = "\n".join((_value(finding, loaded), *finding.evidence))
        status = Text(finding.status, style=_STYLES[finding.status])
        table.add_row(
            Text(finding.node), Text(finding.check), status, Text(value), Text(finding.need), Text(finding.fix or "")
        )
    return table


def _lines(findings: Sequence[Finding], loaded: LoadedRecipe) -> Iterator[str]:
    for finding in _collapsed(findings):
        yield finding.model_copy(update={"value": _value(finding, loaded)}).line()
        yield from (f"  | {line}" for line in finding.evidence)
    yield _summary(findings)


def _value(finding: Finding, loaded: LoadedRecipe) -> str:
    """With the place that asks for it: file and line for a key of the recipe."""
    where = finding.where
    if where is not None and where.partition(".")[0] in Recipe.model_fields:
        where = loaded.locate(where)
    return f"{where}: {finding.value}" if where else finding.value


def _collapsed(findings: Iterable[Finding]) -> Iterator[Finding]:
    """What is well on several nodes takes one row a check."""
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
    told = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    return f"{len(findings)} checks: {told or 'nothing to check'}"
