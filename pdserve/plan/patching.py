"""Selects the patches of a role's engines and of an LMCache server, by the recipe and the versions.

An LMCache server has no plugin system: with a patch it is started through our own main.
"""

from __future__ import annotations

from pdserve.errors import RecipeError
from pdserve.installed.versions import Versions
from pdserve.patches import registry
from pdserve.patches.lmcache import host_events, host_memory
from pdserve.patches.patch import Deployment, Patch
from pdserve.recipe import effective
from pdserve.recipe.connectors.caches import LmcacheMpSection
from pdserve.recipe.connectors.registry import AnyConnector, RawSection, class_names
from pdserve.recipe.model import Recipe, Role
from pdserve.recipe.sections import Lmcache


def deployment_of(recipe: Recipe, role: Role, connector: AnyConnector | None, versions: Versions) -> Deployment:
    """Return what decides which patches a role needs."""
    return Deployment(
        versions=versions,
        platform=recipe.platform,
        connectors=class_names(connector),
        settings=settings_of(recipe, role, connector),
    )


def settings_of(recipe: Recipe, role: Role, connector: AnyConnector | None) -> frozenset[str]:
    """Return the settings of this role that only a patch provides."""
    settings = set()
    if role.load_timeout_seconds is not None:
        settings.add("load_timeout_seconds")
    lmcache = effective.lmcache_leaves(connector)
    if any(effective.load_cap_of(recipe, role, leaf) for leaf in lmcache):
        settings.add("max_tokens_per_load")
    if any(leaf.min_load_tokens for leaf in lmcache):
        settings.add("min_load_tokens")
    if lmcache and recipe.lmcache is not None and is_on(recipe.lmcache, host_events.SWITCH):
        settings.add(host_events.SWITCH)
    return frozenset(settings)


def is_on(section: Lmcache, switch: str) -> bool:
    """Return whether lmcache.env asks for what this variable switches on."""
    return str(section.env.get(switch, "")).strip() == "1"


def load_cap(recipe: Recipe) -> int | None:
    """Return the cap of loads in tokens: the smallest of all roles that load from LMCache."""
    caps = [
        effective.load_cap_of(recipe, role, leaf)
        for _, role, connector in effective.roles(recipe)
        for leaf in effective.lmcache_leaves(connector)
    ]
    return min(filter(None, caps), default=None)


def minimum_load(recipe: Recipe) -> int | None:
    """Return the minimum of loads in tokens: the largest of all roles that load from LMCache."""
    least = [
        leaf.min_load_tokens
        for _, _, connector in effective.roles(recipe)
        for leaf in effective.lmcache_leaves(connector)
    ]
    return max(filter(None, least), default=None)


def select_patches(recipe: Recipe, role: Role, connector: AnyConnector | None, versions: Versions) -> tuple[str, ...]:
    """Return the patches of a role's engines, names in the order of the registry.

    Raises RecipeError when the recipe's list leaves out one that it cannot do without: a required one, or the one that
    provides a setting of the recipe.
    """
    for name in recipe.allow_unknown_upstream:
        registry.find(name, where="allow_unknown_upstream")
    deployment = deployment_of(recipe, role, connector, versions)
    named = registry.select(recipe.patches, deployment)
    selected = tuple(name for name in named if not runs_in_server(registry.find(name)))
    for patch in registry.REGISTRY:
        indispensable = not runs_in_server(patch) and bool(patch.required or patch.settings)
        if indispensable and patch.name not in selected and patch.needed(deployment):
            raise missing_patch_error(patch, deployment)
    if isinstance(connector, RawSection):
        # Which class vLLM loads is the recipe's own business there.
        return tuple(name for name in selected if registry.find(name).vehicle != "subclass")
    return selected


def runs_in_server(patch: Patch) -> bool:
    """Return whether a patch is for LMCache's server alone, of which engines know nothing."""
    return patch.runs_in == ("lmcache-server",)


def missing_patch_error(patch: Patch, deployment: Deployment) -> RecipeError:
    """Return the error about a list of patches that lacks one which the deployment needs."""
    asked = sorted(patch.settings & deployment.settings)
    needs = f"the setting {asked[0]}" if asked else f"vllm {deployment.versions.vllm or '(of unknown version)'}"
    return RecipeError(
        f"{needs} needs the patch {patch.name}, not in `patches`",
        where="patches",
        cause=f"{patch.summary} ({patch.issue})",
        todo=f"add {patch.name} to the list, or write patches: auto",
    )


SERVER_MAIN = "pdserve.patches.lmcache_server_main"
SWITCHES = (host_memory.SWITCH, host_events.SWITCH)
"""Variables of lmcache.env that ask for patches: 1 is on."""


def select_server_patches(recipe: Recipe, section: Lmcache, versions: Versions) -> tuple[str, ...]:
    """Return the names of the patches of an LMCache server, in the order of the registry. Raises RecipeError when the
    recipe's list lacks a patch that its own environment asks for, or when the server of lmcache.command would not load
    them."""
    deployment = Deployment(
        versions=versions,
        platform=recipe.platform,
        connectors=frozenset({LmcacheMpSection.ABOUT.class_name}),
        settings=frozenset(name for name in SWITCHES if is_on(section, name)),
    )
    named = registry.select(recipe.patches, deployment)
    selected = tuple(name for name in named if runs_in_server(registry.find(name)))
    asked = [
        patch for patch in registry.REGISTRY if runs_in_server(patch) and patch.settings and patch.needed(deployment)
    ]
    for patch in asked:
        if patch.name not in selected:
            raise missing_patch_error(patch, deployment)
    if selected and section.command is not None and SERVER_MAIN not in section.command:
        if asked:
            names = ", ".join(patch.name for patch in asked)
            raise RecipeError(
                f"the server's patches ({names}) are loaded by {SERVER_MAIN}, which lmcache.command replaces",
                where="lmcache.command",
                todo=f"let the command run `python -m {SERVER_MAIN}`, or leave {' and '.join(SWITCHES)} out of "
                "lmcache.env",
            )
        return ()
    return selected
