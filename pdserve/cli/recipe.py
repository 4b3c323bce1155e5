"""`pdserve validate`, `plan`, `render` and `schema`. Apart from verbs/recipe.py for a fast --help."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from pdserve.errors import RecipeError
from pdserve.operations.plan_recipe import batch_script, check_job, load, plan_for, recipe_words
from pdserve.printable import printable
from pdserve.reach.cluster_file import Cluster
from pdserve.recipe.schema import json_schema, json_schema_of

if TYPE_CHECKING:
    from pdserve.sizing import SizingOptions


def run_validate(recipe: Path, set_: Sequence[str], unset: Sequence[str], *, online: bool = False) -> None:
    """Prints a summary of what would run; warnings go to stderr. Raises RecipeError."""
    planned = plan_for(load(recipe, set_, unset), None, run_dir="RUN_DIR", run_id="RUN_ID", online=online)
    check_job(planned)
    for warning in dict.fromkeys([*planned.loaded.warnings, *planned.plan.warnings]):
        typer.echo(f"warning: {warning}", err=True)
    plan = planned.plan
    typer.echo(f"{recipe}: valid. {plan.name} ({plan.mode}, {plan.platform}) on {len(plan.nodes)} node(s):")
    for process in plan.processes:
        devices = f"  devices {','.join(map(str, process.devices))}" if process.devices else ""
        ports = " ".join(f"{purpose}:{port}" for purpose, port in process.ports.items())
        typer.echo(f"  {process.name:<14} {process.node:<10} {ports}{devices}")


def run_plan(
    recipe: Path,
    set_: Sequence[str],
    unset: Sequence[str],
    given: SizingOptions,
    *,
    as_json: bool,
    online: bool,
) -> None:
    """Prints the numbers, then the edges that are crossed. Exit 2 when one of them is an error."""
    from pdserve.operations.size import size
    from pdserve.sizing import sizing_rows

    sizing, planned = size(load(recipe, set_, unset), given, online=online)
    for warning in dict.fromkeys([*planned.loaded.warnings, *planned.plan.warnings]):
        typer.echo(f"warning: {warning}", err=True)
    if as_json:
        typer.echo(sizing.model_dump_json(indent=2))
    else:
        _show_numbers(list(sizing_rows(sizing)))
        for crossing in sizing.crossings:
            typer.echo(
                f"{crossing.severity}: {planned.loaded.locate(crossing.where)}: {crossing.where}: {crossing.what}"
            )
            typer.echo(f"  what to do: {crossing.todo}")
        if not sizing.crossings:
            typer.echo("no edge is crossed")
    if any(crossing.severity == "error" for crossing in sizing.crossings):
        raise typer.Exit(RecipeError.exit_code)


def _show_numbers(lines: Sequence[tuple[str, str, str]]) -> None:
    if not sys.stdout.isatty():
        for of, label, value in lines:
            typer.echo(printable(f"{of}: {label}: {value}"))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("of", "what", "value", header_style="bold")
    before = ""
    for of, label, value in lines:
        table.add_row(Text("" if of == before else of), Text(label), Text(value))
        before = of
    Console().print(table)


def run_render(recipe: Path, set_: Sequence[str], unset: Sequence[str], *, as_json: bool, slurm: bool) -> None:
    """Prints the plan for nodes of the recipe's own kind, or the batch script that asks for them."""
    from pdserve.cli.console import show_plan
    from pdserve.operations.shown_change import with_shown_agents

    if as_json and slurm:
        raise typer.BadParameter("--slurm is a script and --json the plan: give one of them")
    loaded = load(recipe, set_, unset)
    planned = plan_for(loaded, None, run_dir=f"run-{recipe.stem}", run_id="rendered")
    plan = planned.plan if slurm else with_shown_agents(planned).plan
    for warning in dict.fromkeys([*loaded.warnings, *plan.warnings]):
        typer.echo(f"warning: {warning}", err=True)
    if slurm:
        typer.echo(batch_script(planned, recipe_words(recipe, set_, unset)), nl=False)
    else:
        show_plan(plan, None, as_json=as_json)


def run_schema(*, cluster: bool) -> None:
    """Prints the JSON Schema that schema/recipe.schema.json or schema/cluster.schema.json must equal."""
    typer.echo(json.dumps(cluster_schema() if cluster else json_schema(), indent=2))


def cluster_schema() -> dict[str, Any]:
    """Return the schema of cluster files as data."""
    return json_schema_of(Cluster, "pdserve cluster file", "The machines of a deployment, schema 1.")
