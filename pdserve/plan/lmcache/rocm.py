"""Warnings of a plan for ROCm about LMCache's transfer of KV."""

from __future__ import annotations

from collections.abc import Iterator

from pdserve.known.defects import HANG_ON_ROCM
from pdserve.patches.lmcache.host_events import SWITCH
from pdserve.plan.engines.patching import is_on
from pdserve.recipe.effective import lmcache_leaves, roles, transfer_mode_of
from pdserve.recipe.model import Recipe


def hazards(recipe: Recipe) -> Iterator[str]:
    """Warnings. Opening an event of another process blocks for ever on some ROCm stacks, and only lmcache_driven
    does so. Can go when LMCache's import_event has a way of its own for ROCm (lmcache#4419)."""
    if recipe.platform != "rocm":
        return
    host_events = recipe.lmcache is not None and is_on(recipe.lmcache, SWITCH)
    for name, _, connector in roles(recipe):
        for leaf in lmcache_leaves(connector):
            if transfer_mode_of(recipe, leaf)[1] == "lmcache_driven":
                yield f"{name}: {_HOST_EVENTS if host_events else _HANG}"


_HANG = (
    f"{HANG_ON_ROCM.what} ({HANG_ON_ROCM.source}; seen with ROCm 7.14 and vllm 0.23, and with ROCm "
    "7.2.3 at the start on gfx950: MI350X, MI355X; not with ROCm 7.2.3 and vllm 0.27): "
    f"let `pdserve verify` prove a reload; where it hangs, set lmcache.env.{SWITCH}: 1 (patch lmcache-host-events), or "
    "lmcache.transfer_mode: engine_driven. Not the change that the issue proposes: with it KV is copied before it is "
    "written"
)
_HOST_EVENTS = (
    f"{SWITCH} is on: no event of another process is opened (lmcache#4419), and a step that stores is waited for. This "
    "was proven by simulation only: let `pdserve verify` prove a reload"
)
