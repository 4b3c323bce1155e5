"""Memory for KV that a recipe states: a flag with vLLM's suffixes, and on a CPU a variable that comes before it."""

from __future__ import annotations

from pdserve.recipe import effective
from pdserve.recipe.model import Recipe, Role
from pdserve.recipe.vllm_int import vllm_int

FLAG = "kv-cache-memory-bytes"
_GIB = 1 << 30


def stated_kv_bytes(recipe: Recipe, role: Role) -> int | None:
    """Of one worker; None: the recipe leaves it to vLLM. Raises ValueError for a flag that vLLM does not take."""
    on_cpu = recipe.platform == "cpu"
    space = str(effective.env_of(recipe, role).get("VLLM_CPU_KVCACHE_SPACE", "")).strip()
    if on_cpu and space.isdecimal():
        return int(space) * _GIB  # platforms/cpu.py sets it over the flag
    value = effective.args_of(recipe, role).get(FLAG)
    stated = None if value is None else vllm_int(value)
    if stated is not None and stated < 0:
        raise ValueError(f"less than nothing: {value!r}")
    return stated if stated or on_cpu else None  # on a device 0 is as if it were not there (gpu_worker.py)
