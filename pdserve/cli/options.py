"""Arguments that several commands share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pdserve.operations.look import Destination
    from pdserve.recipe.load.loader import LoadedRecipe

OWN_CODES_OF_RUN = 200
"""`pdserve run` ends with the code of its command; what goes wrong with pdserve itself has its usual code plus this."""

RecipeArgument = Annotated[Path, typer.Argument(help="The recipe (YAML).", show_default=False)]
NameArgument = Annotated[
    str | None, typer.Argument(help="The deployment; not needed when there is only one.", show_default=False)
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a value of the recipe: --set prefill.instances=2"),
]
UnsetOption = Annotated[list[str] | None, typer.Option("--unset", metavar="KEY", help="Remove a key of the recipe.")]
ClusterOption = Annotated[
    Path | None,
    typer.Option("--cluster", metavar="FILE", help="Hosts to use, reached by ssh; see clusters/example.yaml."),
]
ThisMachineOption = Annotated[
    bool, typer.Option("--this-machine", help="Inside a Slurm job: use this machine only, without srun.")
]
OnlineOption = Annotated[
    bool, typer.Option("--online", help="Ask the hub for config.json where the model is not in its cache here.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ClientPythonOption = Annotated[
    str | None,
    typer.Option("--python", help="An interpreter with the client; else the engines' own, or that of --setup."),
]
TokenizerOption = Annotated[
    str | None, typer.Option("--tokenizer", help="The folder of the tokenizer; else that of the model.")
]
LimitOption = Annotated[float, typer.Option("--limit", min=1, help="Seconds for each run of the client.")]
USUAL_LIMIT = 1800.0
"""A run of the client may take so long, unless --limit says otherwise."""


def load_and_place(
    recipe: Path, set_: Sequence[str] | None, unset: Sequence[str] | None, cluster: Path | None, *, this_machine: bool
) -> tuple[LoadedRecipe, Destination]:
    """Load a recipe with its overrides, and choose where it goes. Raises BadParameter for two options that contradict
    each other, RecipeError, and PreflightError before any node is asked."""
    from pdserve.operations.look import choose_destination
    from pdserve.operations.plan_recipe import load, recipe_words

    if cluster is not None and this_machine:
        raise typer.BadParameter(
            "--cluster names the hosts to use, --this-machine takes none of them: give one of the two"
        )
    loaded = load(recipe, set_ or [], unset or [])
    words = recipe_words(recipe, set_ or [], unset or [])
    return loaded, choose_destination(loaded, cluster, this_machine=this_machine, words=words)


def _option(name: str, metavar: str, text: str) -> typer.models.OptionInfo:
    info: typer.models.OptionInfo = typer.Option(f"--{name}", metavar=metavar, min=0.001, help=text)
    return info


DeviceMemory = Annotated[float | None, _option("device-memory", "GIB", "Memory of one device.")]
KvMemory = Annotated[float | None, _option("kv-memory", "GIB", "For KV on each rank, as an engine's log has it.")]
Link = Annotated[float | None, _option("link", "GBIT", "Rate between prefill and decode, Gbit/s.")]
Disk = Annotated[float | None, _option("disk", "GB", "Rate at which a node reads weights, GB/s.")]
PromptTokens = Annotated[int | None, typer.Option("--prompt-tokens", min=1, help="Tokens of a prompt.")]
OutputTokens = Annotated[int | None, typer.Option("--output-tokens", min=1, help="Tokens of an answer.")]
PrefillRate = Annotated[
    float | None, _option("prefill-rate", "TOKENS", "Prompt tokens a second, one prefill instance.")
]
DecodeRate = Annotated[float | None, _option("decode-rate", "TOKENS", "Tokens a second of one decode instance.")]
QueueSeconds = Annotated[float | None, _option("queue-seconds", "SECONDS", "The longest wait in an engine's queue.")]
