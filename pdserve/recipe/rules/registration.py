"""The time in which an engine must be able to register at an LMCache server that is still pinning its L1."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress

from pdserve.recipe.effective import lmcache_leaves, roles
from pdserve.recipe.kv_memory import stated_kv_bytes
from pdserve.recipe.load.problems import Problem
from pdserve.recipe.model import Recipe

SECONDS_A_GIB = 1.0
STEP_SECONDS = 300
"""Of the timeout that is advised."""
_ON_DEMAND = "LMCACHE_ROCM_DEMAND_PINNED_ALLOCATOR"
_GIB = 1 << 30


def timeouts(recipe: Recipe) -> Iterator[Problem]:
    """A timeout that is likely too short for the server's L1 and the KV that its engines register.

    The rule: one second for each GiB that is pinned or mapped while engines register. That is L1 (what is pinned at
    the start, where the rest is pinned on demand), and the KV of the workers where the recipe states its size
    (kv-cache-memory-bytes); weights are not registered and do not count.
    The source: the published launches on MI355X. On ROCm the server pins L1 in the background and acknowledges no
    registration while that holds up the opening of the engines' handles. `did not respond to register_kv_caches within
    300 s` was seen with 1360 GB; the launch with 1200 GB has 1200 s, and those with 2500 GB pin on demand. No rate was
    measured here. Such a stall is not reported from CUDA, and on a CPU nothing is pinned.
    """
    section = recipe.lmcache
    if section is None or recipe.platform != "rocm":
        return
    on_demand = str(section.env.get(_ON_DEMAND, "")).strip() == "1"
    pinned = section.l1_init_size_gb if on_demand else section.l1_size_gb
    needed = (pinned + _stated_kv_gib(recipe)) * SECONDS_A_GIB
    if section.mq_timeout_seconds >= needed:
        return
    advised = math.ceil(needed / STEP_SECONDS) * STEP_SECONDS
    yield Problem(
        ("lmcache", "mq_timeout_seconds"),
        f"engines may not be registered within {section.mq_timeout_seconds:g} s: the server pins and maps about "
        f"{needed / SECONDS_A_GIB:.0f} GiB meanwhile, and a second for each GiB is what published launches allow",
        f"write lmcache.mq_timeout_seconds: {advised}",
        also=(("lmcache", "l1_size_gb"),),
    )


def _stated_kv_gib(recipe: Recipe) -> float:
    """Of all workers of the largest role that attaches; 0 where the recipe leaves the size to vLLM."""
    sizes = [0.0]
    for _, role, connector in roles(recipe):
        with suppress(ValueError):  # a flag that vLLM refuses: the engine does not come that far
            stated = stated_kv_bytes(recipe, role) or 0
            if lmcache_leaves(connector):
                sizes.append(stated * role.parallel.workers / _GIB)
    return max(sizes)
