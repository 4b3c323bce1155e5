"""A file is told by the tool that it was written for, and becomes a recipe."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from packaging.version import InvalidVersion, Version

from pdserve.errors import RecipeError
from pdserve.importing import shell_script, srt_recipe, vllm_recipe
from pdserve.importing.launch import Draft, ImportChoice, Launch, Note, SourcedValue
from pdserve.importing.recipe_draft import draft
from pdserve.importing.srt_variants import has_several, unlike_srtctl, variants
from pdserve.importing.sweep_draft import ImportedVariant, SweepDraft, read_benchmark, sweep_draft
from pdserve.importing.vllm_recipe import Collection, is_recipe
from pdserve.importing.yaml_tree import Tree, read
from pdserve.installed.distributions import DISTRIBUTIONS
from pdserve.installed.versions import PACKAGES

TAXONOMY, STRATEGIES, STORES = "taxonomy.yaml", "strategies", "kv_store"
"""Of vLLM's collection of recipes."""
_LABELLED = re.compile(r"(?:^|[_-])(?P<package>vllm|lmcache|mooncake)[_-]v?(?P<version>\d+\.\d+[\w.]*?)(?=[_-]|$)")
"""rocm6.4_vllm_0.9.1 in a tag."""
_TAGGED = re.compile(r"v?(?P<version>\d+\.\d+\.\d+(?:\.?(?:post|rc|dev)\d+)*)(?=[_-]|$)")
"""v0.20.1-ubuntu2404: the tag begins with the version of what the repository is named after."""
_REPOSITORIES = {"lmcache": "lmcache", "vllm-openai": "vllm", "vllm-openai-rocm": "vllm", "vllm": "vllm"}
"""First or last part of an image's name -> what its tags count. The first part wins: lmcache/vllm-openai:v0.5.4 is of
LMCache."""
_PARTS = {name: part for part in PACKAGES for name in DISTRIBUTIONS[part]}
_INSTALLED = re.compile(
    rf"(?<![\w.-])(?P<name>{'|'.join(sorted(map(re.escape, _PARTS), key=len, reverse=True))})(?:\[[\w,-]*\])?"
    r"==(?P<version>\d[\w.+!-]*)"
)
_COMMENT = re.compile(r"^\s*#")


def import_launch(
    text: str,
    file: str,
    choice: ImportChoice,
    beside: Mapping[str, str] | None = None,
) -> Draft:
    """Return the recipe that `text` describes. `beside`: the other files of a collection of recipes, by their paths in
    it. Raises RecipeError for what cannot become a recipe."""
    if shell_script.matches(text) and not file.endswith((".yaml", ".yml")):
        _check_choice(choice, file, shell_script.OPTIONS)
        return _draft(shell_script.launch(text, file, choice), text)
    tree = read(text, file)
    if is_recipe(tree):
        _check_choice(choice, file, vllm_recipe.OPTIONS)
        # Its text is a guide too, whose commands are of other ways to install.
        return _draft(vllm_recipe.launch(tree, _collection(file, beside or {}), choice), "")
    if not srt_recipe.matches(tree):
        raise RecipeError(
            "this is no launch that pdserve can read",
            where=f"{file}:1",
            todo="give a recipe of srt-slurm, one of vLLM's recipes, or a shell script with a line `vllm serve`",
        )
    _check_choice(choice, file, srt_recipe.OPTIONS)
    return _of_variants(variants(tree), text, file, choice.variant)


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


def _of_variants(trees: Mapping[str, Tree], text: str, file: str, name: str | None) -> Draft:
    """Return the variant of that name; without a name the only one, or the first where all serve the same."""
    if name is not None:
        if name not in trees:
            raise RecipeError(f"there is no variant {name}", where=file, todo=_choose(trees))
        return _draft(srt_recipe.launch(trees[name]), text)
    if "base" in trees and len(trees) > 1 and not srt_recipe.has_roles(trees["base"]):
        trees = {variant: tree for variant, tree in trees.items() if variant != "base"}
    drafts = {variant: _draft(srt_recipe.launch(tree), text) for variant, tree in trees.items()}
    first = next(iter(drafts.values()))
    if any(other.served() != first.served() for other in drafts.values()):
        raise RecipeError(f"the file describes {len(drafts)} deployments", where=f"{file}:1", todo=_choose(trees))
    return first


def import_variants(text: str, file: str) -> SweepDraft | None:
    """Return all deployments of `text` as a recipe and a sweep over it; None: it is no recipe of srt-slurm with
    several. A variant that cannot become a recipe is a note. Raises RecipeError where none can."""
    if not file.endswith((".yaml", ".yml")):
        return None
    tree = read(text, file)
    if is_recipe(tree) or not srt_recipe.matches(tree) or not has_several(tree):
        return None
    trees = variants(tree)
    if tree.has("base") and len(trees) > 1:
        trees = {name: variant for name, variant in trees.items() if name.partition(":")[0] != "base"}
    made: list[ImportedVariant] = []
    notes = list(unlike_srtctl(tree))
    refused: RecipeError | None = None
    for name, variant in trees.items():
        try:
            made.append(ImportedVariant(name, _draft(srt_recipe.launch(variant), text), read_benchmark(variant)))
        except RecipeError as error:
            refused = refused or error
            notes.append(Note(SourcedValue(None, name or "the file", 0), f"it is no point: {error.what}", "served"))
    if not made and refused is not None:
        raise refused
    return sweep_draft(made, notes)


def _draft(launch: Launch, text: str) -> Draft:
    return replace(draft(launch), versions=named_versions(launch, text))


def _choose(trees: Mapping[str, Tree]) -> str:
    known = [name for name in trees if name]
    if not known:
        return "leave --variant out: the file describes one deployment"
    shown = known[:20]
    more = f" and {len(known) - len(shown)} more" if len(known) > len(shown) else ""
    one = f"give one of them with --variant: {' '.join(shown)}{more}"
    return f"{one}; or all as a recipe and a sweep file: --out RECIPE --sweep SWEEP"


def named_versions(launch: Launch, text: str) -> dict[str, SourcedValue]:
    """Return the version of each package, and where the file has it. The most exact source wins: what the file lists as
    the contents of its image, then what it installs, then the tag of its image. A tag without a version (nightly) names
    none."""
    versions: dict[str, SourcedValue] = {}
    for package, at in (*launch.frameworks.items(), *_installed(text), *_of_image(launch.image)):
        if package not in versions and _is_version(at.value):
            versions[package] = at
    return versions


def _installed(text: str) -> Iterator[tuple[str, SourcedValue]]:
    """Yield the packages of each `pip install lmcache==0.5.4`, wherever it stands but in a comment. Of two the first
    counts."""
    for number, written in enumerate(text.splitlines(), start=1):
        if "install" in written and not _COMMENT.match(written):
            for match in _INSTALLED.finditer(written):
                yield _PARTS[match["name"]], SourcedValue(match["version"], f"install {match['name']}", number)


def _of_image(image: SourcedValue | None) -> Iterator[tuple[str, SourcedValue]]:
    # NVIDIA counts its own releases of vLLM's image: 25.09.
    if image is None or not isinstance(image.value, str) or image.value.startswith("nvcr.io"):
        return
    name, _, tag = image.value.rpartition("/")[2].partition("@")[0].partition(":")
    labelled = {match["package"]: match["version"] for match in _LABELLED.finditer(tag)}
    for package, version in labelled.items():
        yield package, image.of(version)
    first = image.value.split("/")[-2] if "/" in image.value else ""
    package = _REPOSITORIES.get(first if first == "lmcache" else name)
    if package is not None and not labelled and (match := _TAGGED.match(tag)) is not None:
        yield package, image.of(match["version"])


def _is_version(text: Any) -> bool:
    try:
        Version(str(text))
    except InvalidVersion:
        return False
    return True
