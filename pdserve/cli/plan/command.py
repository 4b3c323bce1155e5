"""`pdserve plan`"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pdserve.errors import RecipeError
from pdserve.operations.plan_recipe import load
from pdserve.operations.size import size
from pdserve.printable import printable
from pdserve.sizing.given import Given
from pdserve.sizing.rows import rows


def run(
    recipe: Path,
    set_: Sequence[str],
    unset: Sequence[str],
    given: Given,
    *,
    as_json: bool,
    online: bool,
) -> None:
    """Prints the numbers, then the edges that are crossed. Exit 2 when one of them is an error."""
    sizing, planned = size(load(recipe, set_, unset), given, online=online)
    for warning in dict.fromkeys([*planned.loaded.warnings, *planned.plan.warnings]):
        typer.echo(f"warning: {warning}", err=True)
    if as_json:
        typer.echo(sizing.model_dump_json(indent=2))
    else:
        _show(list(rows(sizing)))
        for crossing in sizing.crossings:
            typer.echo(
                f"{crossing.severity}: {planned.loaded.locate(crossing.where)}: {crossing.where}: {crossing.what}"
            )
            typer.echo(f"  what to do: {crossing.todo}")
        if not sizing.crossings:
            typer.echo("no edge is crossed")
    if any(crossing.severity == "error" for crossing in sizing.crossings):
        raise typer.Exit(RecipeError.exit_code)


def _show(lines: Sequence[tuple[str, str, str]]) -> None:
    if not sys.stdout.isatty():
        for of, label, value in lines:
            typer.echo(printable(f"{of}: {label}: {value}"))
        return
    table = Table("of", "what", "value", header_style="bold")
    before = ""
    for of, label, value in lines:
        table.add_row(Text("" if of == before else of), Text(label), Text(value))
        before = of
    Console().print(table)
