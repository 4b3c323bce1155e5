"""Print a table as wide as the terminal, and a plan."""

from __future__ import annotations

import json

import typer
from rich.console import Console, ConsoleDimensions

from pdserve.operations.progress import ProgressTerminal
from pdserve.operations.shown_change import ShownChange
from pdserve.plan.bash import render_shell
from pdserve.plan.model import Plan

_COLUMNS_OF_A_FILE = 200


def wide_console(*, stderr: bool = False, goes_on: bool = False) -> Console:
    """Return a console as wide as the terminal; in a file or a pipe, wide enough that no cell is cut. `goes_on`: also
    when nothing takes its lines any more."""
    console = ProgressTerminal(stderr=stderr) if goes_on else Console(stderr=stderr, soft_wrap=True, highlight=False)
    if not console.is_terminal:
        console.size = ConsoleDimensions(_COLUMNS_OF_A_FILE, console.height)
    return console


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
