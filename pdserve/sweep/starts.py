"""Which deployments are started anew before each of their points, because nothing else empties their caches. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from pdserve.recipe.connectors.registry import KINDS, MULTI_CLASS, class_names
from pdserve.recipe.effective import args_of, connector_of, policy_of
from pdserve.recipe.model import Recipe

NO_ENDPOINT = "engine.cache_reset_endpoint is off"
ROUTER = "vllm-router remembers the prompts of all points (prefix_aware)"


def only_emptied_by_a_start(recipe: Recipe) -> str | None:
    """Why; None: the sweep can empty each of its caches while it serves."""
    return next(_reasons(recipe), None)


def _reasons(recipe: Recipe) -> Iterator[str]:
    for name, role in recipe.roles():
        attached = recipe.lmcache is not None and name in recipe.lmcache.on
        keeper = keeps_beside(class_names(connector_of(recipe, name, role)), attached=attached)
        if keeper is not None:
            yield f"what {keeper} keeps ({name}) is only emptied by a start"
        if not recipe.engine.cache_reset_endpoint and args_of(recipe, role).get("enable-prefix-caching") is not False:
            yield NO_ENDPOINT
        # Of a single worker it remembers nothing: pdserve.plan.proxy.vllm_router.
        several = recipe.proxy.kind == "vllm-router" and role.instances > 1
        if several and policy_of(recipe, name) == "prefix_aware":
            yield ROUTER


def keeps_beside(connectors: Collection[str], *, attached: bool) -> str | None:
    """Which of these classes of vLLM keeps KV, or may, that neither the engines' endpoint nor the LMCache of the
    deployment clears; None: none does. `attached`: an LMCache server of the deployment is theirs. vLLM's
    `reset_external` is not asked for: not every connector has it, and MultiConnector does not show which of its
    children had (multi_connector.py, 0.32: no answer counts as success)."""
    for name in sorted(connectors):
        kind = KINDS.get(name)
        cleared = kind is not None and kind.attaches_lmcache and attached
        if (kind is None and name != MULTI_CLASS) or (kind is not None and kind.caches and not cleared):
            return name
    return None


def ends_with_it(connector: str) -> bool:
    """Whether what this class of vLLM keeps is gone when its deployment has ended."""
    return connector in KINDS and not KINDS[connector].attaches_lmcache
