"""Empties the caches of a deployment between two points, so that each of them begins with the same.

What an earlier point left cannot be loaded anyway, because each run of the client has a `cache_salt` of its own
(pdserve.bench.token_checks): but it would take room, and what a point evicts would depend on the points before it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import httpx

from pdserve.bench.run import ServingDeployment
from pdserve.errors import StateError, VerifyError
from pdserve.observe.engine_metrics import lmcache_snapshot
from pdserve.observe.remote_http import client as http_client
from pdserve.observe.remote_http import seen_from_here
from pdserve.plan.model import LmcacheServer
from pdserve.verify.cache import clear_engines
from pdserve.verify.target import Target, describe

CHECK = "empty-cache"
EMPTIED = "emptied"
NO_ENDPOINT = "not emptied: engine.cache_reset_endpoint is off in the recipe"
NO_ROUTE = "not emptied: this LMCache has no POST /cache/clear"
_CLEAR_SECONDS = 10.0
"""Stores and loads of the point before may still hold objects, which LMCache does not remove then."""
_ANSWER_SECONDS = 60.0
"""LMCache frees them all before it answers."""
_POLL_SECONDS = 0.2


class NotEmptiedError(StateError):
    """A cache that can be emptied still has something."""


async def empty_caches(serving: ServingDeployment) -> Mapping[str, str]:
    """What became of the cache of each engine and LMCache server, by its name. Raises NotEmptiedError."""
    plan = seen_from_here(serving.plan, serving.state)
    async with http_client(serving.run, serving.state) as http:
        return await empty(Target(plan, http, serving.key))


async def empty(target: Target) -> Mapping[str, str]:
    """As `empty_caches`. Engines first: what they still store goes to LMCache."""
    plan = target.plan
    outcome = dict.fromkeys((worker.name for worker in plan.proxy.workers), NO_ENDPOINT)
    if plan.cache_reset_endpoint:
        try:
            await clear_engines(target)
        except VerifyError as error:
            raise NotEmptiedError(error.what, where=error.where, cause=error.cause, todo=error.todo) from error
        outcome = dict.fromkeys(outcome, EMPTIED)
    for server in plan.lmcache:
        outcome[server.process] = await _empty(server, target)
    return outcome


async def _empty(server: LmcacheServer, target: Target) -> str:
    """Its L1, until it counts no object any more. With an L2 objects are held until they are written there, which may
    take long: what is left then only takes room."""
    until = time.monotonic() + _CLEAR_SECONDS
    first: int | None = None
    while True:
        now = await lmcache_snapshot(server.http_url, target.client)
        first = now.objects if first is None else first
        if now.objects == 0:
            return f"{EMPTIED} of {first} objects"
        problem = now.error or await _clear(server, target.client)
        if problem == NO_ROUTE:
            return NO_ROUTE
        if time.monotonic() > until:
            if target.plan.has_l2(server) and not problem:
                return f"not emptied: {now.objects} objects are held, perhaps on their way to the L2"
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
