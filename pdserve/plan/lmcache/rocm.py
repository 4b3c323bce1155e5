"""Warnings of a plan for ROCm about LMCache's transfer of KV."""

from __future__ import annotations

from collections.abc import Iterator

from pdserve.recipe.effective import lmcache_leaves, roles, transfer_mode_of
from pdserve.recipe.model import Recipe


def hazards(recipe: Recipe) -> Iterator[str]:
    """Warnings. Opening an event of another process blocks for ever on some ROCm stacks, and only lmcache_driven
    does so. Can go when LMCache's import_event has a way of its own for ROCm (lmcache#4419)."""
    if recipe.platform != "rocm":
        return
    for name, _, connector in roles(recipe):
        for leaf in lmcache_leaves(connector):
            if transfer_mode_of(recipe, leaf)[1] == "lmcache_driven":
                yield (
                    f"{name}: with lmcache_driven the start or the first reload hangs on some ROCm stacks "
                    "(lmcache#4419; seen with ROCm 7.14 and vllm 0.23, and with ROCm 7.2.3 at the start on gfx950: "
                    "MI350X, MI355X; not with ROCm 7.2.3 and vllm 0.27): let `pdserve verify` prove a reload; where it "
                    "hangs, set lmcache.transfer_mode: engine_driven, or build LMCache with the patch of that issue"
                )
