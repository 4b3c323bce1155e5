"""Memory for KV that a recipe states: a flag with vLLM's suffixes, and on a CPU a variable that comes before it."""

from __future__ import annotations

import re

from pdserve.recipe import effective
from pdserve.recipe.model import Recipe, Role

FLAG = "kv-cache-memory-bytes"
_GIB = 1 << 30
_PLAIN = re.compile(r"[+-]?\d{1,18}", re.ASCII)
_BINARY = re.compile(r"(\d{1,18})([KMGT])", re.ASCII)
_DECIMAL = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)([kmgt])", re.ASCII)
_FACTORS = {
    **{"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12},
    **{"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40},
}


def vllm_int(value: object) -> int:
    """A number as vLLM reads it for the flags that take suffixes (human_readable_int, utils/argparse_utils.py): k, m, g
    and t are powers of 1000, K, M, G and T powers of 1024, which have no decimals. Raises ValueError."""
    if isinstance(value, int | str) and not isinstance(value, bool):
        text = str(value).strip()
        if _PLAIN.fullmatch(text):
            return int(text)
        if match := _BINARY.fullmatch(text):
            return int(match[1]) * _FACTORS[match[2]]
        if match := _DECIMAL.fullmatch(text):
            return int(float(match[1]) * _FACTORS[match[2]])
    raise ValueError(f"no number of vLLM: {value!r}")


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
