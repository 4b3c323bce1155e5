"""Every patch there is, and which of them a deployment needs. Imports no engine."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Literal

from pdserve.errors import RecipeError
from pdserve.patches.lmcache import (
    computed_count,
    demand_pinned,
    final_capacity,
    host_events,
    host_events_worker,
    identity,
    load_cap,
    lookup_locks,
    lost_send,
    min_load,
    registration,
)
from pdserve.patches.mooncake import (
    bootstrap,
    cpu_device,
    late_bootstrap,
    pulls,
    requests,
    sends,
    transfer_metrics,
)
from pdserve.patches.moriio import unread_prompts
from pdserve.patches.multiconnector import prom_metrics, selection
from pdserve.patches.nixl import abandoned_kv, failed_groups
from pdserve.patches.offloading import foreign_blocks
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
    prom_metrics.PATCH,
    transfer_metrics.PATCH,
    selection.PATCH,
    stale_completions.PATCH,
    ready_waiters_first.PATCH,
    failed_loads_stand_back.PATCH,
    failed_group.PATCH,
    common_local_hit.PATCH,
    load_timeout.PATCH,
    lost_send.PATCH,
    computed_count.PATCH,
    registration.PATCH,
    requests.PATCH,
    sends.PATCH,
    pulls.PATCH,
    bootstrap.PATCH,
    late_bootstrap.PATCH,
    cpu_device.PATCH,
    abandoned_kv.PATCH,
    failed_groups.PATCH,
    unread_prompts.PATCH,
    foreign_blocks.PATCH,
    identity.PATCH,
    demand_pinned.PATCH,
    final_capacity.PATCH,
    host_events_worker.PATCH,
    host_events.PATCH,
    lookup_locks.PATCH,
    load_cap.PATCH,
    min_load.PATCH,
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
