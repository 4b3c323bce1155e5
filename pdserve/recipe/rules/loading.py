"""Settings of loading external KV: weights, caps, minimum, timeout."""

from __future__ import annotations

from collections.abc import Iterator

from pdserve.recipe.connectors.lmcache_mp import LmcacheMpSection
from pdserve.recipe.connectors.registry import AnyConnector, MultiSection, RawSection
from pdserve.recipe.effective import LOAD_CAP_SWITCH, leaves, load_cap_of, roles
from pdserve.recipe.load.problems import Path, Problem
from pdserve.recipe.model import Recipe
from pdserve.roles import ENGINE_ROLES


def weights(recipe: Recipe) -> Iterator[Problem]:
    """A weight compares children of a multi; it has no meaning for a connector alone."""
    for name, _, connector in roles(recipe):
        if connector is None or isinstance(connector, MultiSection | RawSection) or connector.load_weight is None:
            continue
        yield Problem(
            (name, "connector", "load_weight"),
            "only children of a multi are weighed against each other",
            "remove it, or put the connector into kind: multi",
        )


def caps(recipe: Recipe) -> Iterator[Problem]:
    """A cap below one chunk, or below the minimum, means that nothing is ever loaded."""
    chunk = recipe.lmcache.chunk_size if recipe.lmcache is not None else None
    for name, role, connector in roles(recipe):
        for path, leaf in _lmcache_leaves(name, connector):
            cap, least = load_cap_of(recipe, role, leaf), leaf.min_load_tokens
            if cap is not None and chunk is not None and cap < chunk:
                yield Problem(
                    (*path, "max_tokens_per_load"),
                    f"LMCache loads whole chunks of {chunk} tokens, so a cap of {cap} loads nothing",
                    f"use a multiple of {chunk}",
                    also=(("lmcache", "chunk_size"),),
                )
            if cap is not None and least is not None and cap < least:
                yield Problem(
                    (*path, "min_load_tokens"),
                    f"no load of at most {cap} tokens has {least} of them, so nothing is ever loaded",
                    "lower it, or raise max_tokens_per_load",
                    also=((*path, "max_tokens_per_load"),),
                )


def switches(recipe: Recipe) -> Iterator[Problem]:
    """The environment's way to set the cap."""
    for section in ("engine", *ENGINE_ROLES):
        env = getattr(getattr(recipe, section), "env", {})
        value = env.get(LOAD_CAP_SWITCH)
        if value is not None and not (str(value).strip().isascii() and str(value).strip().isdecimal()):
            yield Problem((section, "env", LOAD_CAP_SWITCH), f"{value} is not a number of tokens", "0 turns it off")


def timeouts(recipe: Recipe) -> Iterator[Problem]:
    """A timeout of loads needs a connector whose settings are ours."""
    for name, role, connector in roles(recipe):
        if role.load_timeout_seconds is None:
            continue
        path: Path = (name, "load_timeout_seconds")
        if connector is None:
            yield Problem(path, f"{name} has no connector, so it never loads KV", "remove it")
        elif isinstance(connector, RawSection):
            yield Problem(
                path,
                "a raw connector is handed to vLLM as it is",
                "put load_timeout_seconds into its kv_connector_extra_config, and name the patch in `patches`",
            )


def uneven_caps(recipe: Recipe) -> Iterator[Problem]:
    """A cap that is rounded."""
    chunk = recipe.lmcache.chunk_size if recipe.lmcache is not None else None
    for name, _, connector in roles(recipe):
        for path, leaf in _lmcache_leaves(name, connector):
            if chunk is not None and leaf.max_tokens_per_load is not None and leaf.max_tokens_per_load % chunk:
                yield Problem(
                    (*path, "max_tokens_per_load"),
                    f"not a multiple of LMCache's chunk: {leaf.max_tokens_per_load // chunk * chunk} tokens are loaded",
                    f"use a multiple of {chunk}",
                )


def _lmcache_leaves(name: str, connector: AnyConnector | None) -> Iterator[tuple[Path, LmcacheMpSection]]:
    for index, leaf in enumerate(leaves(connector)):
        if isinstance(leaf, LmcacheMpSection):
            yield (
                ((name, "connector", "of", index) if isinstance(connector, MultiSection) else (name, "connector")),
                leaf,
            )
