"""Switches of the LMCache server's patches, which are for ROCm."""

from __future__ import annotations

from collections.abc import Iterator

from pdserve.recipe.load.problems import Problem
from pdserve.recipe.model import Recipe
from pdserve.roles import ENGINE_ROLES

_ON_OFF = "LMCACHE_ROCM_DEMAND_PINNED_ALLOCATOR"
_STEP = "LMCACHE_ROCM_DEMAND_PINNED_STEP_GB"
_IDLE = ("LMCACHE_ROCM_MP_BLOCK_FALLBACK", "LMCACHE_ROCM_MP_BLOCK_FALLBACK_DTYPE")
"""Of a patch for lmcache < 0.4.7 that is gone; published recipes set them."""


def switches(recipe: Recipe) -> Iterator[Problem]:
    """Variables that ask for patches of the LMCache server (plan/lmcache/patching.py)."""
    for section in ("engine", *ENGINE_ROLES):
        for variable in getattr(getattr(recipe, section), "env", {}):
            if variable in (_ON_OFF, _STEP, *_IDLE):
                yield Problem(
                    (section, "env", variable), "engines know nothing of it: it is for the LMCache server",
                    "write it into lmcache.env",
                )  # fmt: skip
    if recipe.lmcache is None:
        return
    for variable, value in recipe.lmcache.env.items():
        path, text = ("lmcache", "env", variable), str(value).strip()
        if variable == _ON_OFF and text not in ("0", "1"):
            yield Problem(path, f"{text} is neither 1 (on) nor 0 (off)")
        elif variable == _STEP and not _positive(text):
            yield Problem(path, f"{text} is not a positive number of GiB", "64 unless it is set")


def idle_switches(recipe: Recipe) -> Iterator[Problem]:
    """Switches that nothing reads: on other platforms all, on ROCm those of the patch that is gone."""
    if recipe.lmcache is None:
        return
    for variable in recipe.lmcache.env:
        if variable in _IDLE:
            yield Problem(
                ("lmcache", "env", variable), "has no effect: lmcache 0.4.7 and later copy blocks", "remove it"
            )
        elif variable in (_ON_OFF, _STEP) and recipe.platform != "rocm":
            yield Problem(
                ("lmcache", "env", variable), f"has no effect on {recipe.platform}", "remove it", also=(("platform",),)
            )


def _positive(text: str) -> bool:
    try:
        return 0 < float(text) < float("inf")
    except ValueError:
        return False
