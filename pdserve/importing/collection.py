"""vLLM's collection of recipes: what lies beside a recipe, and how places in its files are named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.importing.launch import Sourced
from pdserve.importing.yaml_tree import Tree
from pdserve.recipe.load.problems import Path, dotted

INSTALLED_BY_HAND = "installed by hand there; the image must have it, or setup of the recipe"
NOT_STARTED = "a process beside the engines, which is not started"
OWN_PROXY = "pdserve has a proxy of its own (section proxy)"


@dataclass(frozen=True)
class Collection:
    """The hardware, and the strategies and stores by name."""

    taxonomy: Tree
    strategies: Mapping[str, Tree]
    stores: Mapping[str, Tree]


def is_recipe(tree: Tree) -> bool:
    """Whether the file looks like a recipe of the collection."""
    return isinstance(tree.get("model"), dict) and tree.has("model", "model_id") and tree.has("variants")


def key_in(tree: Tree, path: Path) -> str:
    """The key, with the file where it is not the recipe itself."""
    return dotted(path) if is_recipe(tree) else f"{tree.file.rpartition('/')[2]} {dotted(path)}"


def at_in(tree: Tree, path: Path) -> Sourced:
    """What is at `path`, with its place."""
    return Sourced(tree.get(*path), key_in(tree, path), tree.line(*path))
