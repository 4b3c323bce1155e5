"""Verbs that write a recipe: `init`, `import`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdserve.starter.goal import Goal

if TYPE_CHECKING:
    from pdserve.importing.launch import Draft, ImportChoice
    from pdserve.operations.import_recipe import ImportedRecipe

verbs = typer.Typer()


@verbs.command()
def init(
    model: Annotated[str, typer.Option("--model", metavar="FOLDER_OR_ID", help="A folder, or an id of the hub.")],
    hardware: Annotated[str, typer.Option("--hardware", help="mi355x, mi300x, h100, h200, b200 or cpu.")],
    nodes: Annotated[int, typer.Option("--nodes", min=1, max=64, help="Nodes of the deployment.")] = 1,
    gpus_per_node: Annotated[
        int | None, typer.Option("--gpus-per-node", min=1, max=64, help="Without it as the hardware usually has.")
    ] = None,
    goal: Annotated[
        Goal,
        typer.Option("--goal", help="Most requests, fewest seconds a token, or long prompts that begin alike."),
    ] = Goal.THROUGHPUT,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="RECIPE", help="Write the recipe here instead of to stdout.")
    ] = None,
) -> None:
    """Write a first recipe for a model on known hardware, with the reason of each value.

    Sizes are the planner's where config.json and the headers of the weights are in the folder, or in the hub's cache;
    else a default that says so. The recipe is loaded and planned before it is written. An instance stays on one node.
    Exit 2 when the model does not fit, with the numbers; nothing is overwritten.
    """
    from pdserve.operations.import_recipe import save
    from pdserve.operations.init_recipe import first_recipe

    made = first_recipe(model, hardware, nodes=nodes, devices=gpus_per_node, goal=goal)
    if out is None:
        typer.echo(made.text, nl=False)
    else:
        save(made.text, out)
    for warning in made.warnings:
        typer.echo(f"warning: {warning}", err=True)
    for crossing in made.crossings:
        typer.echo(f"{crossing.severity}: {crossing.where}: {crossing.what}", err=True)
        typer.echo(f"  what to do: {crossing.todo}", err=True)
    if not made.checked:
        typer.echo(
            f"warning: nothing was checked against the memory of {hardware}: config.json and weights of {model} are "
            "not on this machine, or not of a kind that the planner knows",
            err=True,
        )
    if out is not None:
        there = shlex.quote(str(out))
        typer.echo(
            f"{out} is written; next: pdserve plan {there}, pdserve preflight {there}, pdserve up {there}", err=True
        )


@verbs.command("import")
def import_(
    file: Annotated[
        Path | None,
        typer.Argument(help="The launch: a recipe of srt-slurm or of vLLM, or a shell script.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="RECIPE", help="Write the recipe here instead of to stdout.")
    ] = None,
    sweep: Annotated[
        Path | None,
        typer.Option(
            "--sweep",
            metavar="SWEEP",
            help="srt-slurm: all deployments of a file with `sweep` or `base`, as a recipe (--out) and a sweep file.",
        ),
    ] = None,
    variant: Annotated[
        str | None, typer.Option("--variant", help="Which deployment of a file that describes several.")
    ] = None,
    hardware: Annotated[
        str | None, typer.Option("--hardware", help="vLLM's recipes and shell scripts: b200, mi355x, ...")
    ] = None,
    strategy: Annotated[
        str | None, typer.Option("--strategy", help="vLLM's recipes: pd_cluster, single_node_tp, ...")
    ] = None,
    feature: Annotated[
        list[str] | None,
        typer.Option("--feature", help="vLLM's recipes: exactly these; without it those that are on by default."),
    ] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, help="vLLM's recipes: nodes of an instance.")] = None,
    kv_offload: Annotated[
        str | None,
        typer.Option(
            "--kv-offload", metavar="NAME", help="vLLM's recipes: lmcache, kv_store_distributed_mooncake, ..."
        ),
    ] = None,
    var: Annotated[
        list[str] | None,
        typer.Option("--var", metavar="NAME=VALUE", help="A shell script's variable: what its caller would set."),
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option("--check", metavar="RECIPE", help="Compare this recipe with the launch of --against instead."),
    ] = None,
    against: Annotated[Path | None, typer.Option("--against", metavar="FILE", help="The launch, for --check.")] = None,
) -> None:
    """Read the launch of another tool and print the recipe that it becomes, with the origin of each value.

    Nothing is left out in silence: the recipe's first lines list what was not carried over. Exit 11 when some of that
    changes what is served, and with --check when the recipe departs from the launch.
    """
    from pdserve.importing.launch import ImportChoice
    from pdserve.operations import import_recipe

    features = None if feature is None else tuple(feature)
    choice = ImportChoice(variant, hardware, strategy, features, nodes, kv_offload, _variables(var or []))
    if (check is None) != (against is None):
        raise typer.BadParameter("--check RECIPE and --against FILE belong together")
    if check is not None and against is not None:
        if file is not None or out is not None or sweep is not None:
            raise typer.BadParameter("--check compares and writes nothing: leave FILE, --out and --sweep out")
        import_recipe.compare(check, against, choice)
        typer.echo(f"{check}: what {against} describes")
    elif file is None:
        raise typer.BadParameter("give the FILE to import, or --check RECIPE --against FILE")
    elif sweep is not None:
        if out is None or variant is not None:
            raise typer.BadParameter("--sweep SWEEP takes all variants, and --out RECIPE for the recipe beside it")
        _import_sweep(file, out, sweep)
    else:
        _run_import(file, out, choice)


def _variables(texts: Sequence[str]) -> dict[str, str]:
    """Read several `NAME=VALUE`. Raises BadParameter."""
    for text in texts:
        if not text.partition("=")[0].isidentifier() or "=" not in text:
            raise typer.BadParameter(f"--var {text}: write --var NAME=VALUE")
    return {name: value for name, _, value in (text.partition("=") for text in texts)}


def _run_import(file: Path, out: Path | None, choice: ImportChoice) -> None:
    """Print the recipe, or write it to `out`; what was not carried over goes to stderr. Raises RecipeError, and
    SourceDifferenceError for an import in part."""
    from pdserve.operations import import_recipe

    recipe = import_recipe.import_file(file, choice)
    if out is None:
        typer.echo(recipe.text, nl=False)
    else:
        import_recipe.save(recipe.text, out)
    _warn([recipe])
    _report(recipe.draft, out)
    import_recipe.check_whole(recipe.draft.losses(), file)


def _import_sweep(file: Path, out: Path, sweep: Path) -> None:
    """Write a recipe and a sweep file over it; what was not carried over goes to stderr. Raises RecipeError, and
    SourceDifferenceError for an import in part."""
    from pdserve.importing.recipe_text import line
    from pdserve.operations import import_recipe
    from pdserve.sweep import imported

    made = imported.import_sweep(file, out, sweep, os.environ)
    imported.write_sweep(made, out, sweep)
    _warn([import_recipe.ImportedRecipe(made.recipe, made.draft.recipe, loaded) for loaded in made.recipes])
    for note in made.draft.notes:
        if note.effect == "confirm":
            typer.echo(f"please confirm: {line(note)}", err=True)
    _report(made.draft.recipe, out)
    deployments = len(made.draft.deployments)
    typer.echo(f"{sweep}: {made.points} points on {deployments} deployments; next: pdserve sweep {sweep} --dry-run")
    import_recipe.check_whole(made.draft.losses(), file)


def _warn(recipes: Sequence[ImportedRecipe]) -> None:
    """Print each warning once: those of the recipes, and of the versions that the file names."""
    from pdserve.operations.import_recipe import version_hazards

    texts = [_without_line(warning) for recipe in recipes for warning in recipe.loaded.warnings]
    texts += [hazard for recipe in recipes for hazard in version_hazards(recipe)]
    for text in dict.fromkeys(texts):
        typer.echo(f"warning: {text}", err=True)


def _without_line(warning: str) -> str:
    """Return a warning without its place. The recipe was read from a file that is not there any more. What a point of a
    sweep has set is its own place."""
    return warning if warning.startswith("--set ") else warning.partition(": ")[2]


def _report(draft: Draft, out: Path | None) -> None:
    from pdserve.importing.recipe_text import line

    for note in draft.notes:
        if note.effect == "confirm":
            typer.echo(f"please confirm: {line(note)}", err=True)
    others = sum(note.effect in ("replaced", "unused") for note in draft.notes)
    where = "the recipe" if out is None else str(out)
    typer.echo(f"{draft.file} ({draft.format}): the first lines of {where} list {others} further values", err=True)
