"""Which tool a file was written for, and the recipe that it becomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.errors import RecipeError
from pdserve.importing import srt_slurm
from pdserve.importing.launch import Draft
from pdserve.importing.recipe_draft import draft
from pdserve.importing.variants import variants
from pdserve.importing.yaml_tree import Tree, read


@dataclass(frozen=True)
class Choice:
    """What is chosen of a file that describes several deployments."""

    variant: str | None = None


def imported(text: str, file: str, choice: Choice) -> Draft:
    """The recipe that `text` describes. Raises RecipeError for what cannot become one."""
    tree = read(text, file)
    if not srt_slurm.is_one(tree):
        raise RecipeError(
            "this is no launch that pdserve can read",
            where=f"{file}:1",
            todo="give a recipe of srt-slurm with a vllm backend",
        )
    return _of_variants(variants(tree), file, choice.variant)


def _of_variants(trees: Mapping[str, Tree], file: str, name: str | None) -> Draft:
    """The variant of that name; without a name the only one, or the first where all serve the same."""
    if name is not None:
        if name not in trees:
            raise RecipeError(f"there is no variant {name}", where=file, todo=_choose(trees))
        return draft(srt_slurm.launch(trees[name]))
    drafts = {one: draft(srt_slurm.launch(tree)) for one, tree in trees.items()}
    first = next(iter(drafts.values()))
    if any(_served(other) != _served(first) for other in drafts.values()):
        raise RecipeError(f"the file describes {len(drafts)} deployments", where=f"{file}:1", todo=_choose(trees))
    return first


def _served(one: Draft) -> dict[str, object]:
    return {key: value for key, value in one.document.items() if key not in ("name", "description")}


def _choose(trees: Mapping[str, Tree]) -> str:
    known = [name for name in trees if name]
    if not known:
        return "leave --variant out: the file describes one deployment"
    shown = known[:20]
    more = f" and {len(known) - len(shown)} more" if len(known) > len(shown) else ""
    return f"give one of them with --variant: {' '.join(shown)}{more}"
