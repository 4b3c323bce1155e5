"""The recipe line that removes a cause, with the numbers of the run that it was seen in."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from pdserve.doctor.records import RunRecords
from pdserve.recipe.sections import Lmcache
from pdserve.roles import EngineRole

_CHANGE = re.compile(r"([=*+])")
_SINGLE = ("instances", "workers")
"""Keys whose default is 1: of roles, and of the proxy."""
_CPU_KV = "VLLM_CPU_KVCACHE_SPACE"
_SEATS = 256
"""vLLM's max-num-seqs where no recipe sets it."""


def value_at(recipe: Mapping[str, Any], key: str) -> Any:
    """Of a dotted key; None where the recipe does not set it."""
    here: Any = recipe
    for part in key.split("."):
        if not isinstance(here, Mapping):
            return None
        here = here.get(part)
    return here


def filled(setting: str, records: RunRecords) -> str:
    """`KEY=VALUE` of `KEY=VALUE`, of `KEY*2` (twice of what the run had, and not less than the default) and of `KEY+1`;
    empty where what it had is not known, and where the run had that value already."""
    key, change, value = _CHANGE.split(setting, maxsplit=1) if setting else ("", "=", "")
    now = _now(records, key)
    if change == "=":
        return "" if str(now) == value else setting
    if not isinstance(now, int | float) or isinstance(now, bool):
        return ""
    return f"{key}={max(2 * now, _default(key)) if change == '*' else now + 1:g}"


def fewer_sequences(records: RunRecords, role: EngineRole) -> str:
    """Half as many requests at once in each engine of a role: the flag where the recipe has it now."""
    for section in (role, "engine"):
        seats = value_at(records.recipe, f"{section}.args.max-num-seqs")
        if isinstance(seats, int) and not isinstance(seats, bool) and seats > 1:
            return f"{section}.args.max-num-seqs={seats // 2}"
    return f"{role}.args.max-num-seqs={_SEATS // 2}"


def less_memory(records: RunRecords, role: str, lacking: int) -> str:
    """The largest piece of host memory that the recipe asks for, less what the process lacked (bytes): the L1 of an
    LMCache server, the KV of an engine on a CPU. Empty where it asks for none, or all of it lacked."""
    if role == "lmcache":
        l1 = _now(records, "lmcache.l1_size_gb")
        return _reduced("lmcache.l1_size_gb", l1, lacking, 0.1)
    for section in (role, "engine"):
        key = f"{section}.env.{_CPU_KV}"
        if (space := value_at(records.recipe, key)) is not None:
            return _reduced(key, space, lacking, 1)
    return ""


def _reduced(key: str, now: object, lacking: int, step: float) -> str:
    """GiB, down to a multiple of `step`: VLLM_CPU_KVCACHE_SPACE is a whole number."""
    if isinstance(now, str) and now.isdecimal():
        now = int(now)
    if not isinstance(now, int | float) or isinstance(now, bool):
        return ""
    left = math.floor((now - lacking / 2**30) / step + 1e-9) * step
    return f"{key}={left:g}" if left >= step else ""


def _default(key: str) -> float:
    """Of a number in the lmcache section; 0: it has none."""
    section, _, leaf = key.partition(".")
    default = Lmcache.model_fields[leaf].default if section == "lmcache" and leaf in Lmcache.model_fields else None
    return default if isinstance(default, int | float) and not isinstance(default, bool) else 0


def _now(records: RunRecords, key: str) -> Any:
    """What the run had: of the recipe, or its default; None: not known."""
    section, _, leaf = key.partition(".")
    value = value_at(records.recipe, key)
    if value is not None or not records.recipe:
        return value
    if section == "lmcache" and leaf in Lmcache.model_fields:
        return Lmcache.model_fields[leaf].default
    return 1 if leaf in _SINGLE else None
