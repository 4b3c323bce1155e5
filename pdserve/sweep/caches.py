"""The caches of a deployment, emptied between two points, so that each of them begins with the same.

What an earlier point left cannot be loaded anyway, because each run of the client has a `cache_salt` of its own
(pdserve.bench.validity): but it would take room, and what a point evicts would depend on the points before it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterator, Mapping

import httpx

from pdserve.bench.run import ServingDeployment
from pdserve.errors import StateError, VerifyError
from pdserve.observe.metrics import lmcache_snapshot
from pdserve.observe.remote_http import client as http_client
from pdserve.observe.remote_http import seen_from_here
from pdserve.plan.model import LmcacheServer, Plan
from pdserve.recipe.connectors.registry import KINDS, MULTI_CLASS, class_names
from pdserve.recipe.effective import args_of, connector_of, policy_of
from pdserve.recipe.model import Recipe
from pdserve.verify.cache import clear_engines
from pdserve.verify.target import Target, describe

RESET_IS_OFF = "engine.cache_reset_endpoint is off"
ROUTER = "vllm-router remembers the prompts of all points (prefix_aware)"


def only_emptied_by_a_start(recipe: Recipe) -> str | None:
    """Return why a start is needed to empty the caches; None: the sweep can empty each of its caches while it
    serves."""
    return next(_reasons(recipe), None)


def _reasons(recipe: Recipe) -> Iterator[str]:
    for name, role in recipe.roles():
        attached = recipe.lmcache is not None and name in recipe.lmcache.on
        keeper = keeps_beside(class_names(connector_of(recipe, name, role)), attached=attached)
        if keeper is not None:
            yield f"what {keeper} keeps ({name}) is only emptied by a start"
        if not recipe.engine.cache_reset_endpoint and args_of(recipe, role).get("enable-prefix-caching") is not False:
            yield RESET_IS_OFF
        # Of a single worker it remembers nothing: pdserve.plan.proxy.
        several = recipe.proxy.kind == "vllm-router" and role.instances > 1
        if several and policy_of(recipe, name) == "prefix_aware":
            yield ROUTER


def keeps_beside(connectors: Collection[str], *, attached: bool) -> str | None:
    """Return which of these classes of vLLM keeps KV, or may, that neither the engines' endpoint nor the LMCache of the
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
    """Return whether what this class of vLLM keeps is gone when its deployment has ended."""
    return connector in KINDS and not KINDS[connector].attaches_lmcache


CHECK = "empty-cache"
EMPTIED, NEW = "emptied", "empty: started for this point"
_NOT = "not emptied: "
NO_ENDPOINT = f"{_NOT}engine.cache_reset_endpoint is off in the recipe"
NO_ROUTE = f"{_NOT}this LMCache has no POST /cache/clear"
NONE = "none: prefix caching is off"
LASTS = "kept: others may use it, and after this deployment too; each run of the client has a salt of its own"
_NO_PREFIX_CACHE = "--no-enable-prefix-caching"
_CLEAR_SECONDS = 10.0
"""Stores and loads of the point before may still hold objects, which LMCache does not remove then."""
_L2_SECONDS = 120.0
"""With an L2 they are held until they are written there. A start takes longer than that on most machines with GPUs."""
_ANSWER_SECONDS = 60.0
"""LMCache frees them all before it answers."""
_POLL_SECONDS = 0.2


class NotEmptiedError(StateError):
    """A cache that can be emptied still has something."""


async def empty_caches(serving: ServingDeployment, *, new: bool) -> Mapping[str, str]:
    """Empty the caches, and return what became of that of each engine and LMCache server, by its name. `new`: nothing
    was measured on the deployment yet. Raises NotEmptiedError."""
    plan = seen_from_here(serving.plan, serving.state)
    async with http_client(serving.run, serving.state) as http:
        return await empty(Target(plan, http, serving.key), new=new)


def find_full_cache(outcome: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the first cache that a start would empty, and why it is not empty; None: there is none."""
    return next(((name, text) for name, text in outcome.items() if text.startswith(_NOT)), None)


def require_empty(outcome: Mapping[str, str]) -> None:
    """Require that every cache was emptied. Raises NotEmptiedError for the first that was not."""
    if (full := find_full_cache(outcome)) is not None:
        name, text = full
        raise NotEmptiedError(
            text,
            where=name,
            cause="only a start of the deployment empties it, or it fills again while it is emptied",
            todo=f"pdserve logs {name.partition(',')[0]}",
        )


async def empty(target: Target, *, new: bool = False) -> Mapping[str, str]:
    """Do what `empty_caches` does on a target. Engines come first: what they still store goes to LMCache."""
    plan = target.plan
    if plan.cache_reset_endpoint:
        try:
            await clear_engines(target)
        except VerifyError as error:
            raise NotEmptiedError(error.what, where=error.where, cause=error.cause, todo=error.todo) from error
    outcome = {worker.name: _engine(plan, worker.name, new=new) for worker in plan.proxy.workers}
    for server in plan.lmcache:
        outcome[server.process] = await _empty(server, target)
        if plan.has_l2(server):
            outcome[f"{server.process}, L2"] = LASTS
    return outcome


def _engine(plan: Plan, name: str, *, new: bool) -> str:
    """Return what became of an engine's caches, after `clear_engines` if that was possible."""
    engine = plan.process(name)
    attached = any(name in server.engines for server in plan.lmcache)
    keeper = keeps_beside([connector.class_name for connector in engine.connectors], attached=attached)
    if keeper is not None:
        if not new:
            return f"{_NOT}only a start empties what {keeper} keeps"
        return NEW if ends_with_it(keeper) else f"{NEW}; what {keeper} keeps elsewhere is not known"
    if _NO_PREFIX_CACHE in engine.argv:
        return NONE
    if plan.cache_reset_endpoint:
        return EMPTIED
    return NEW if new else NO_ENDPOINT


async def _empty(server: LmcacheServer, target: Target) -> str:
    """Empty the L1 of a server, until it counts no object any more. With an L2 objects are held until they are written
    there, which may take long."""
    began = time.monotonic()
    first: int | None = None
    while True:
        now = await lmcache_snapshot(server.http_url, target.client)
        first = now.objects if first is None else first
        if now.objects == 0:
            return f"{EMPTIED} of {first} objects"
        problem = now.error or await _clear(server, target.client)
        if problem == NO_ROUTE:
            return NO_ROUTE
        held_for_l2 = target.plan.has_l2(server) and not problem
        if time.monotonic() - began > (_L2_SECONDS if held_for_l2 else _CLEAR_SECONDS):
            if held_for_l2:
                return f"{_NOT}{now.objects} objects are held, perhaps on their way to the L2"
            raise NotEmptiedError(
                f"LMCache could not be emptied: {problem or f'{now.objects} objects are left'}",
                where=server.process,
                cause="the server does not answer" if problem else "stores or loads hold them, or their locks leaked",
                todo=f"pdserve logs {server.process}",
            )
        await asyncio.sleep(_POLL_SECONDS)


async def _clear(server: LmcacheServer, client: httpx.AsyncClient) -> str:
    """Removes every object that nothing holds. Why it did not, if so. Source of the route:
    lmcache/v1/multiprocess/http_apis/cache_api.py, 0.5.6."""
    try:
        answer = await client.post(f"{server.http_url}/cache/clear", json={}, timeout=_ANSWER_SECONDS)
    except httpx.HTTPError as error:
        return f"POST /cache/clear: {describe(error)}"
    if answer.status_code in (404, 405):
        return NO_ROUTE
    return "" if answer.is_success else f"POST /cache/clear was answered {answer.status_code}: {answer.text[:200]}"
