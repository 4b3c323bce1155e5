"""Which deployments are started anew before each of their points, because nothing else empties their caches. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from pdserve.recipe.connectors.registry import KINDS, MULTI_CLASS, class_names
from pdserve.recipe.effective import args_of, connector_of
from pdserve.recipe.model import Recipe

NO_ENDPOINT = "engine.cache_reset_endpoint is off"


def only_emptied_by_a_start(recipe: Recipe) -> str | None:
    """Why; None: the sweep can empty each of its caches while it serves."""
    return next(_reasons(recipe), None)


def _reasons(recipe: Recipe) -> Iterator[str]:
    for name, role in recipe.roles():
        if (keeper := keeps_beside(class_names(connector_of(recipe, name, role)))) is not None:
            yield f"what {keeper} keeps ({name}) is only emptied by a start"
        if not recipe.engine.cache_reset_endpoint and args_of(recipe, role).get("enable-prefix-caching") is not False:
            yield NO_ENDPOINT


def keeps_beside(connectors: Collection[str]) -> str | None:
    """Which of these classes of vLLM keeps KV, or may, that neither the engines' endpoint nor LMCache's clears; None:
    none does. vLLM's `reset_external` is not asked for: not every connector has it, and MultiConnector does not show
    which of its children had (multi_connector.py, 0.32: no answer counts as success)."""
    for name in sorted(connectors):
        kind = KINDS.get(name)
        if (kind is None and name != MULTI_CLASS) or (kind is not None and kind.caches and not kind.attaches_lmcache):
            return name
    return None
