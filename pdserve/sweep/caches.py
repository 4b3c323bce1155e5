"""The caches of a deployment, emptied between two points, so that each of them begins with the same.

What an earlier point left cannot be loaded anyway, because each run of the client has a `cache_salt` of its own
(pdserve.bench.validity): but it would take room, and what a point evicts would depend on the points before it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping

import httpx

from pdserve.bench.run import ServingDeployment
from pdserve.errors import VerifyError
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


def kept_until_start(recipe: Recipe) -> Mapping[str, str]:
    """Return the roles whose caches only a start empties, with the reason. A deployment without any serves on while all
    of its caches are emptied."""
    reasons: dict[str, str] = {}
    for name, role in recipe.roles():
        attached = recipe.lmcache is not None and name in recipe.lmcache.on
        keeper = _keeper(class_names(connector_of(recipe, name, role)), attached=attached)
        # Of a single worker the router remembers nothing: pdserve.plan.proxy.
        several = recipe.proxy.kind == "vllm-router" and role.instances > 1
        if keeper is not None:
            reasons[name] = f"what {keeper} keeps ({name}) is only emptied by a start"
        elif not recipe.engine.cache_reset_endpoint and args_of(recipe, role).get("enable-prefix-caching") is not False:
            reasons[name] = RESET_IS_OFF
        elif several and policy_of(recipe, name) == "prefix_aware":
            reasons[name] = ROUTER
    return reasons


def _keeper(connectors: Collection[str], *, attached: bool) -> str | None:
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


EMPTIED, NEW = "emptied", "empty: started for this point"
_NOT = "not emptied: "
NO_ROUTE = f"{_NOT}this LMCache has no POST /cache/clear"
LASTS = "kept: others may use it, and after this deployment too; each run of the client has a salt of its own"
_CLEAR_SECONDS = 10.0
"""Stores and loads of the point before may still hold objects, which LMCache does not remove then."""
_L2_SECONDS = 120.0
"""With an L2 they are held until they are written there. A start takes longer than that on most machines with GPUs."""
_ANSWER_SECONDS = 60.0
"""LMCache frees them all before it answers."""
_POLL_SECONDS = 0.2


def new_caches(plan: Plan) -> Mapping[str, str]:
    """Return what each cache of a deployment holds that nothing was measured on yet, by its engine or server."""
    holders = [*(worker.name for worker in plan.proxy.workers), *(server.process for server in plan.lmcache)]
    return {**dict.fromkeys(holders, NEW), **_lasting(plan)}


async def empty_caches(serving: ServingDeployment, kept: Mapping[str, str]) -> Mapping[str, str]:
    """Empty the caches, and return what became of each, by its engine or LMCache server. `kept`: of `kept_until_start`.
    A cache that could not be emptied is named by `find_full_cache`."""
    plan = seen_from_here(serving.plan, serving.state)
    async with http_client(serving.run, serving.state) as http:
        return await empty(Target(plan, http, serving.key), kept)


def find_full_cache(outcome: Mapping[str, str]) -> str | None:
    """Return the first cache that a start would empty, and why it is not empty; None: there is none."""
    return next((f"{name}: {text}" for name, text in outcome.items() if text.startswith(_NOT)), None)


async def empty(target: Target, kept: Mapping[str, str]) -> Mapping[str, str]:
    """Do what `empty_caches` does on a target. Engines come first: what they still store goes to LMCache."""
    plan = target.plan
    outcome = {
        worker.name: f"{_NOT}{kept[worker.role]}" if worker.role in kept else EMPTIED for worker in plan.proxy.workers
    }
    if plan.cache_reset_endpoint:
        try:
            await clear_engines(target)
        except VerifyError as error:
            names = {worker.url: worker.name for worker in plan.proxy.workers}
            outcome[names.get(error.where or "", "engines")] = f"{_NOT}{error.what}"
    for server in plan.lmcache:
        outcome[server.process] = await _empty(server, target)
    return {**outcome, **_lasting(plan)}


def _lasting(plan: Plan) -> Mapping[str, str]:
    return {f"{server.process}, L2": LASTS for server in plan.lmcache if plan.has_l2(server)}


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
            return f"{_NOT}{problem or f'{now.objects} objects are held by stores or loads, or their locks leaked'}"
        await asyncio.sleep(_POLL_SECONDS)


async def _clear(server: LmcacheServer, client: httpx.AsyncClient) -> str:
    """Remove every object that nothing holds, and return why that failed; empty: it did not. Source of the route:
    lmcache/v1/multiprocess/http_apis/cache_api.py, 0.5.6."""
    try:
        answer = await client.post(f"{server.http_url}/cache/clear", json={}, timeout=_ANSWER_SECONDS)
    except httpx.HTTPError as error:
        return f"POST /cache/clear: {describe(error)}"
    if answer.status_code in (404, 405):
        return NO_ROUTE
    return "" if answer.is_success else f"POST /cache/clear was answered {answer.status_code}: {answer.text[:200]}"
