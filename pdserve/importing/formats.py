"""Which tool a file was written for, and the recipe that it becomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pdserve.errors import RecipeError
from pdserve.importing import vllm_recipe
from pdserve.importing.choice import ImportChoice
from pdserve.importing.collection import Collection, is_recipe
from pdserve.importing.command_line.installed_parser import BY_LIST, LineReader
from pdserve.importing.launch import Draft, Launch, Note, Sourced
from pdserve.importing.named_versions import named_versions
from pdserve.importing.recipe_draft import draft
from pdserve.importing.shell import script
from pdserve.importing.srt import recipe
from pdserve.importing.srt.benchmark import read_benchmark
from pdserve.importing.srt.variants import has_several, unlike_srtctl, variants
from pdserve.importing.sweep_draft import ImportedVariant, SweepDraft, sweep_draft
from pdserve.importing.yaml_tree import Tree, read

TAXONOMY, STRATEGIES, STORES = "taxonomy.yaml", "strategies", "kv_store"
"""Of vLLM's collection of recipes."""


def imported(
    text: str,
    file: str,
    choice: ImportChoice,
    beside: Mapping[str, str] | None = None,
    lines: LineReader = BY_LIST,
) -> Draft:
    """The recipe that `text` describes. `beside`: the other files of a collection of recipes, by their paths in it.
    Raises RecipeError for what cannot become a recipe."""
    if script.matches(text) and not file.endswith((".yaml", ".yml")):
        _check_choice(choice, file, script.OPTIONS)
        return _draft(script.launch(text, file, choice, lines), text)
    tree = read(text, file)
    if is_recipe(tree):
        _check_choice(choice, file, vllm_recipe.OPTIONS)
        # Its text is a guide too, whose commands are of other ways to install.
        return _draft(vllm_recipe.launch(tree, _collection(file, beside or {}), choice, lines), "")
    if not recipe.matches(tree):
        raise RecipeError(
            "this is no launch that pdserve can read",
            where=f"{file}:1",
            todo="give a recipe of srt-slurm, one of vLLM's recipes, or a shell script with a line `vllm serve`",
        )
    _check_choice(choice, file, recipe.OPTIONS)
    return _of_variants(variants(tree), text, file, choice.variant, lines)


def _check_choice(choice: ImportChoice, file: str, known: Sequence[str]) -> None:
    if options := [option for option in choice.given() if option not in known]:
        text = " and ".join(options)
        raise RecipeError(
            f"{text} choose{'s' if len(options) == 1 else ''} nothing in this file",
            where=file,
            cause=f"a file of this kind takes {', '.join(known)}",
            todo=f"leave {text} out",
        )


def _collection(file: str, beside: Mapping[str, str]) -> Collection:
    if TAXONOMY not in beside:
        raise RecipeError(
            f"no {TAXONOMY} in a folder above the file",
            where=file,
            cause="a recipe of vLLM's collection says little without the collection's hardware and strategies",
            todo="give the file inside a checkout of vllm-project/recipes",
        )
    strategies, stores = (_named_files(beside, folder) for folder in (STRATEGIES, STORES))
    return Collection(read(beside[TAXONOMY], TAXONOMY), strategies, stores)


def _named_files(beside: Mapping[str, str], folder: str) -> dict[str, Tree]:
    trees = [read(text, name) for name, text in beside.items() if name.startswith(f"{folder}/")]
    return {str(tree.get("name")): tree for tree in trees}


def _of_variants(trees: Mapping[str, Tree], text: str, file: str, name: str | None, lines: LineReader) -> Draft:
    """The variant of that name; without a name the only one, or the first where all serve the same."""
    if name is not None:
        if name not in trees:
            raise RecipeError(f"there is no variant {name}", where=file, todo=_choose(trees))
        return _draft(recipe.launch(trees[name], lines), text)
    if "base" in trees and len(trees) > 1 and not recipe.has_roles(trees["base"]):
        trees = {variant: tree for variant, tree in trees.items() if variant != "base"}
    drafts = {variant: _draft(recipe.launch(tree, lines), text) for variant, tree in trees.items()}
    first = next(iter(drafts.values()))
    if any(_served(other) != _served(first) for other in drafts.values()):
        raise RecipeError(f"the file describes {len(drafts)} deployments", where=f"{file}:1", todo=_choose(trees))
    return first


def imported_sweep(text: str, file: str, lines: LineReader = BY_LIST) -> SweepDraft | None:
    """All deployments of `text` as a recipe and a sweep over it; None: it is no recipe of srt-slurm with several. A
    variant that cannot become a recipe is a note. Raises RecipeError where none can."""
    if not file.endswith((".yaml", ".yml")):
        return None
    tree = read(text, file)
    if is_recipe(tree) or not recipe.matches(tree) or not has_several(tree):
        return None
    trees = variants(tree)
    if tree.has("base") and len(trees) > 1:
        trees = {name: variant for name, variant in trees.items() if name.partition(":")[0] != "base"}
    made: list[ImportedVariant] = []
    notes = list(unlike_srtctl(tree))
    refused: RecipeError | None = None
    for name, variant in trees.items():
        try:
            made.append(ImportedVariant(name, _draft(recipe.launch(variant, lines), text), read_benchmark(variant)))
        except RecipeError as error:
            refused = refused or error
            notes.append(Note(Sourced(None, name or "the file", 0), f"it is no point: {error.what}", "served"))
    if not made and refused is not None:
        raise refused
    return sweep_draft(made, notes)


def _draft(launch: Launch, text: str) -> Draft:
    return replace(draft(launch), versions=named_versions(launch, text))


def _served(variant: Draft) -> dict[str, object]:
    return {key: value for key, value in variant.document.items() if key not in ("name", "description")}


def _choose(trees: Mapping[str, Tree]) -> str:
    known = [name for name in trees if name]
    if not known:
        return "leave --variant out: the file describes one deployment"
    shown = known[:20]
    more = f" and {len(known) - len(shown)} more" if len(known) > len(shown) else ""
    one = f"give one of them with --variant: {' '.join(shown)}{more}"
    return f"{one}; or all as a recipe and a sweep file: --out RECIPE --sweep SWEEP"
