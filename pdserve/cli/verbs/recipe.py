"""Verbs about a recipe, before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdserve.cli import options
from pdserve.cli.options import (
    ClusterOption,
    JsonOption,
    OnlineOption,
    RecipeArgument,
    SetOption,
    ThisMachineOption,
    UnsetOption,
)
from pdserve.starter.goal import Goal

verbs = typer.Typer()


@verbs.command()
def validate(
    recipe: RecipeArgument, online: OnlineOption = False, set_: SetOption = None, unset: UnsetOption = None
) -> None:
    """Check a recipe and plan it, without looking at this machine, but for the config.json of its model."""
    from pdserve.cli.recipe import run_validate as run

    run(recipe, set_ or [], unset or [], online=online)


@verbs.command()
def plan(
    recipe: RecipeArgument,
    json_: JsonOption = False,
    online: OnlineOption = False,
    device_memory: options.DeviceMemory = None,
    kv_memory: options.KvMemory = None,
    link: options.Link = None,
    disk: options.Disk = None,
    prompt_tokens: options.PromptTokens = None,
    output_tokens: options.OutputTokens = None,
    prefill_rate: options.PrefillRate = None,
    decode_rate: options.DecodeRate = None,
    queue_seconds: options.QueueSeconds = None,
    set_: SetOption = None,
    unset: UnsetOption = None,
) -> None:
    """Compute what a recipe takes and holds, before it starts: weights, KV blocks, requests, L1, transfer, start.

    Computed from config.json and the headers of the weights on this machine, without a device. Exit 2 when something
    is sure to fail. What is assumed or known as a range only is shown as that; docs/plan.md has the errors.
    """
    from pdserve.cli.recipe import run_plan as run
    from pdserve.sizing import SizingOptions

    given = SizingOptions(
        device_gib=device_memory,
        kv_gib=kv_memory,
        link_gbit=link,
        disk_gb=disk,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        prefill_rate=prefill_rate,
        decode_rate=decode_rate,
        queue_seconds=queue_seconds,
    )
    run(recipe, set_ or [], unset or [], given, as_json=json_, online=online)


@verbs.command()
def render(
    recipe: RecipeArgument,
    json_: JsonOption = False,
    slurm: Annotated[bool, typer.Option("--slurm", help="The batch script that asks for the recipe's nodes.")] = False,
    set_: SetOption = None,
    unset: UnsetOption = None,
) -> None:
    """Print every command and environment of a recipe: as a shell script, or the plan as JSON.

    What a deployment of its name would go on with where it runs: `pdserve up RECIPE --dry-run`.
    """
    from pdserve.cli.recipe import run_render as run

    run(recipe, set_ or [], unset or [], as_json=json_, slurm=slurm)


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
    from pdserve.cli import authoring
    from pdserve.importing.launch import ImportChoice

    features = None if feature is None else tuple(feature)
    choice = ImportChoice(variant, hardware, strategy, features, nodes, kv_offload, authoring.variables(var or []))
    if (check is None) != (against is None):
        raise typer.BadParameter("--check RECIPE and --against FILE belong together")
    if check is not None and against is not None:
        if file is not None or out is not None or sweep is not None:
            raise typer.BadParameter("--check compares and writes nothing: leave FILE, --out and --sweep out")
        authoring.check_recipe(check, against, choice)
    elif file is None:
        raise typer.BadParameter("give the FILE to import, or --check RECIPE --against FILE")
    elif sweep is not None:
        if out is None or variant is not None:
            raise typer.BadParameter("--sweep SWEEP takes all variants, and --out RECIPE for the recipe beside it")
        authoring.import_sweep(file, out, sweep)
    else:
        authoring.run_import(file, out, choice)


@verbs.command()
def init(
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="FOLDER_OR_ID", help="A folder, or an id of the hub; asked for if missing."),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option("--hardware", help="mi355x, mi300x, h100, h200, b200 or cpu; asked for if missing."),
    ] = None,
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
    from pdserve.cli.authoring import run_init as run

    run(model, hardware, nodes, gpus_per_node, goal, out)


@verbs.command()
def preflight(
    recipe: RecipeArgument,
    json_: JsonOption = False,
    cluster: ClusterOption = None,
    this_machine: ThisMachineOption = False,
    fabric: Annotated[
        bool, typer.Option("--fabric", help="Also try a transfer by the recipe's engine for each pair of nodes.")
    ] = False,
    min_gbps: Annotated[
        float | None,
        typer.Option("--min-gbps", min=0.001, help="With --fabric: the least rate of each pair, in Gbit/s."),
    ] = None,
    set_: SetOption = None,
    unset: UnsetOption = None,
) -> None:
    """Check what the recipe needs of every node, and start nothing. Exit 3 when something is missing.

    The nodes are those that `up` would use: of the Slurm job, of --cluster, or this machine.
    """
    from pdserve.cli.preflight import run_preflight as run

    if min_gbps is not None and not fabric:
        raise typer.BadParameter("--min-gbps belongs to --fabric")
    run(
        recipe,
        set_ or [],
        unset or [],
        as_json=json_,
        cluster=cluster,
        this_machine=this_machine,
        fabric=fabric,
        min_gbps=min_gbps,
    )


@verbs.command()
def schema(
    cluster: Annotated[bool, typer.Option("--cluster", help="Of cluster files instead of recipes.")] = False,
) -> None:
    """Print the JSON Schema of recipes, for editors."""
    from pdserve.cli.recipe import run_schema as run

    run(cluster=cluster)
