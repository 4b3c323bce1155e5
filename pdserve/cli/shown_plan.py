"""A plan on stdout, and what it would change of a deployment that runs."""

from __future__ import annotations

import json

import typer

from pdserve.operations.shown_change import ShownChange
from pdserve.plan.model import Plan
from pdserve.plan.render.bash import render_shell


def show_plan(plan: Plan, change: ShownChange | None, *, as_json: bool, replace: bool = False) -> None:
    """A script, with the change in its first comments; or the plan as JSON, with the change as `change`. `replace`:
    as `ShownChange.lines`."""
    if as_json:
        document = plan.model_dump(mode="json")
        if change is not None:
            document["change"] = change.model_dump(mode="json")
        typer.echo(json.dumps(document, indent=2, ensure_ascii=False))
        return
    first, *others = render_shell(plan).split("\n")
    comments = [] if change is None else [f"# {line}" for line in change.lines(replace=replace)]
    typer.echo("\n".join([first, *comments, *others]), nl=False)
