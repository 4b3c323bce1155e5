"""Sizes of memory as Mooncake's configuration has them (mooncake_config.py of 0.3.13): a number of bytes, or one with a
unit, of which each is 1024 times the one before it."""

from __future__ import annotations

import re

_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]?)b?\s*", re.IGNORECASE)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def gib(value: object) -> int | float | None:
    """The size in GiB; None for what is no size."""
    match = _SIZE.fullmatch(str(value))
    if match is None or isinstance(value, bool):
        return None
    number = float(match.group(1)) * _UNITS[match.group(2).lower()] / (1 << 30)
    return int(number) if number == int(number) else number
