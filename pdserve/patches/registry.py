"""Every patch there is, and which of them a deployment needs. Imports no engine."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Literal

from pdserve.errors import RecipeError
from pdserve.patches import moriio, multiconnector, nixl, offloading
from pdserve.patches.lmcache import computed_count, host_events, host_memory, lost_send, registration, reloads
from pdserve.patches.mooncake import bootstrap, cpu_device, pulls, requests, sends, transfer_metrics
from pdserve.patches.patch import Deployment, Patch
from pdserve.patches.scheduler import (
    common_local_hit,
    failed_group,
    failed_loads_stand_back,
    load_timeout,
    ready_waiters_first,
    stale_completions,
)

REGISTRY: tuple[Patch, ...] = (
    multiconnector.PROM_METRICS,
    transfer_metrics.PATCH,
    multiconnector.SELECTION,
    stale_completions.PATCH,
    ready_waiters_first.PATCH,
    failed_loads_stand_back.PATCH,
    failed_group.PATCH,
    common_local_hit.PATCH,
    load_timeout.PATCH,
    lost_send.PATCH,
    computed_count.PATCH,
    registration.REGISTRATION,
    requests.PATCH,
    sends.PATCH,
    pulls.PATCH,
    bootstrap.BOOTSTRAP,
    bootstrap.LATE_BOOTSTRAP,
    cpu_device.PATCH,
    nixl.ABANDONED_KV,
    nixl.FAILED_GROUPS,
    moriio.PATCH,
    offloading.PATCH,
    registration.IDENTITY,
    host_memory.DEMAND_PINNED,
    host_memory.FINAL_CAPACITY,
    host_events.WORKER,
    host_events.SERVER,
    reloads.LOOKUP_LOCKS,
    reloads.LOAD_CAP,
    reloads.MIN_LOAD,
)
"""In the order in which they are applied."""


def select(requested: Literal["auto"] | Sequence[str], deployment: Deployment) -> tuple[str, ...]:
    """Return the names of the patches to apply, in the registry's order.

    auto: those that the deployment needs. A list: exactly those; an unknown name is a RecipeError. A version that is
    not known counts as one that needs the patch.
    """
    if requested == "auto":
        return tuple(patch.name for patch in REGISTRY if patch.needed(deployment))
    for name in requested:
        find(name)
    return tuple(patch.name for patch in REGISTRY if patch.name in requested)


def find(name: str, *, where: str = "patches") -> Patch:
    """Return the patch of that name. Raises RecipeError, about the recipe's key `where`, if there is none."""
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
