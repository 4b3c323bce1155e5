"""What a recipe uses, in the words of the tables in `known`: features of each role, flags, packages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.plan import versions
from pdserve.recipe import effective
from pdserve.recipe.connectors.registry import class_names, kinds_of
from pdserve.recipe.load.problems import dotted
from pdserve.recipe.model import Recipe
from pdserve.recipe.rules.engines import flag_path


@dataclass(frozen=True)
class RecipeUse:
    """Of a recipe, whatever is installed."""

    features: tuple[frozenset[str], ...]
    """Of each role."""
    flags: tuple[tuple[str, Mapping[str, str]], ...]
    """Package, and its flags with their keys in the recipe: of each role, then of LMCache."""
    packages: frozenset[str]
    """That its connectors need."""


def use_of(recipe: Recipe) -> RecipeUse:
    """Pure."""
    section = recipe.lmcache
    features: list[frozenset[str]] = []
    flags: list[tuple[str, Mapping[str, str]]] = []
    packages: set[str] = set()
    for name, role, connector in effective.roles(recipe):
        args = effective.args_of(recipe, role)
        flags.append(("vllm", {flag: dotted(flag_path(recipe, name, flag)) for flag in args}))
        packages |= {kind.package for kind in kinds_of(connector)}
        features.append(
            versions.features(
                role=name,
                platform=recipe.platform,
                connectors=class_names(connector),
                per_tp_rank=section is not None and section.per == "tp-rank",
                of_connectors=frozenset().union(*(leaf.features() for leaf in effective.sections(connector))),
                lmcache_driven=any(
                    effective.transfer_mode_of(recipe, leaf)[1] == "lmcache_driven"
                    for leaf in effective.lmcache_leaves(connector)
                ),
                async_scheduling=args.get("async-scheduling") is not False,
                speculative=effective.drafts(args),
                l2=section is not None and bool(section.l2),
            )
        )
    if section is not None:
        flags.append(("lmcache", {flag: f"lmcache.extra_args.{flag}" for flag in section.extra_args}))
    return RecipeUse(tuple(features), tuple(flags), frozenset(packages))
