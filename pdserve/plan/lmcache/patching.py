"""Which patches an LMCache server gets. It has no plugin system, so with one it is started through our own main."""

from __future__ import annotations

from pdserve.errors import RecipeError
from pdserve.installed.versions import Versions
from pdserve.patches import registry
from pdserve.patches.lmcache import host_events, host_memory
from pdserve.patches.patch import Deployment
from pdserve.plan.engines.patching import is_on, left_out, runs_in_server
from pdserve.recipe.connectors.caches import LmcacheMpSection
from pdserve.recipe.model import Recipe
from pdserve.recipe.sections import Lmcache

SERVER_MAIN = "pdserve.patches.lmcache_server_main"
SWITCHES = (host_memory.SWITCH, host_events.SWITCH)
"""Variables of lmcache.env that ask for patches: 1 is on."""


def select_server_patches(recipe: Recipe, section: Lmcache, versions: Versions) -> tuple[str, ...]:
    """Names, in the order of the registry. Raises RecipeError when the recipe's list leaves out one that its own
    environment asks for, or when lmcache.command would start a server that does not load them."""
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
            raise left_out(patch, deployment)
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
