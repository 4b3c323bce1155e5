"""Numbers of flags as vLLM reads them: some take suffixes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_PLAIN = re.compile(r"[+-]?\d{1,18}", re.ASCII)
_BINARY = re.compile(r"(\d{1,18})([KMGT])", re.ASCII)
_DECIMAL = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)([kmgt])", re.ASCII)
_FACTORS = {
    **{"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12},
    **{"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40},
}
_SUFFIXED = frozenset({"max-model-len", "max-num-batched-tokens"})
"""Of those that are counted with (vllm/engine/arg_utils.py of 0.32)."""


def vllm_int(value: object) -> int:
    """Return a number as vLLM reads it for the flags that take suffixes (human_readable_int, utils/argparse_utils.py):
    k, m, g and t are powers of 1000, K, M, G and T powers of 1024, which have no decimals. Raises ValueError."""
    if isinstance(value, int | str) and not isinstance(value, bool):
        text = str(value).strip()
        if _PLAIN.fullmatch(text):
            return int(text)
        if match := _BINARY.fullmatch(text):
            return int(match[1]) * _FACTORS[match[2]]
        if match := _DECIMAL.fullmatch(text):
            return int(float(match[1]) * _FACTORS[match[2]])
    raise ValueError(f"no number of vLLM: {value!r}")


def stated_int(args: Mapping[str, Any], flag: str) -> int | None:
    """Return a flag that counts something; None: it is not there. Raises ValueError for what is no number above 0, as
    `auto` and -1 of max-model-len are."""
    value = args.get(flag)
    if value is None:
        return None
    if flag in _SUFFIXED:
        value = vllm_int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"no number above 0: {value!r}")
    return value


def known_int(args: Mapping[str, Any], flag: str) -> int | None:
    """Return the number of a flag; None too for what is no such number."""
    try:
        return stated_int(args, flag)
    except ValueError:
        return None
