"""Every patch there is, and which of them a deployment needs. Imports no engine."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Literal

from pdserve.errors import RecipeError
from pdserve.patches import (
    admission_gate,
    common_local_hit,
    failed_group,
    failed_loads_stand_back,
    lmcache_block_copy,
    lmcache_computed_count,
    lmcache_demand_pinned,
    lmcache_final_capacity,
    lmcache_host_events,
    lmcache_host_events_worker,
    lmcache_identity,
    lmcache_load_cap,
    lmcache_lookup_locks,
    lmcache_lost_send,
    lmcache_min_load,
    lmcache_registration,
    load_timeout,
    mooncake_bootstrap,
    mooncake_cpu_device,
    mooncake_pulls,
    mooncake_requests,
    mooncake_sends,
    multiconnector_loser_blocks,
    multiconnector_prom_metrics,
    multiconnector_selection,
    nixl_abandoned_kv,
    nixl_failed_groups,
    ready_waiters_first,
    stale_completions,
)
from pdserve.patches.patch import Deployment, Patch

REGISTRY: tuple[Patch, ...] = (
    multiconnector_prom_metrics.PATCH,
    multiconnector_loser_blocks.PATCH,
    multiconnector_selection.PATCH,
    stale_completions.PATCH,
    admission_gate.PATCH,
    ready_waiters_first.PATCH,
    failed_loads_stand_back.PATCH,
    failed_group.PATCH,
    common_local_hit.PATCH,
    load_timeout.PATCH,
    lmcache_lost_send.PATCH,
    lmcache_computed_count.PATCH,
    lmcache_registration.PATCH,
    mooncake_requests.PATCH,
    mooncake_sends.PATCH,
    mooncake_pulls.PATCH,
    mooncake_bootstrap.PATCH,
    mooncake_cpu_device.PATCH,
    nixl_abandoned_kv.PATCH,
    nixl_failed_groups.PATCH,
    lmcache_identity.PATCH,
    lmcache_demand_pinned.PATCH,
    lmcache_final_capacity.PATCH,
    lmcache_block_copy.PATCH,
    lmcache_host_events_worker.PATCH,
    lmcache_host_events.PATCH,
    lmcache_lookup_locks.PATCH,
    lmcache_load_cap.PATCH,
    lmcache_min_load.PATCH,
)
"""In the order in which they are applied."""


def select(requested: Literal["auto"] | Sequence[str], deployment: Deployment) -> tuple[str, ...]:
    """Names of the patches to apply, in the registry's order.

    auto: those that the deployment needs. A list: exactly those; an unknown name is a RecipeError. A version that is
    not known counts as one that needs the patch.
    """
    if requested == "auto":
        return tuple(patch.name for patch in REGISTRY if patch.needed(deployment))
    for name in requested:
        find(name)
    return tuple(patch.name for patch in REGISTRY if patch.name in requested)


def find(name: str, *, where: str = "patches") -> Patch:
    """The patch of that name. Raises RecipeError, about the recipe's key `where`, if there is none."""
    for patch in REGISTRY:
        if patch.name == name:
            return patch
    names = [patch.name for patch in REGISTRY]
    close = get_close_matches(name, names, n=1)
    raise RecipeError(
        f"there is no patch named {name!r}",
        where=where,
        todo=f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}; or patches: auto",
    )
