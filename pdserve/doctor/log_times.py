"""When a line of a log was written, as the line itself has it."""

from __future__ import annotations

import re

_TIME = re.compile(
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?Z?"  # LMCache, the proxy
    r"|(?<= )\d\d-\d\d \d\d:\d\d:\d\d"  # vLLM: no year
    r"|(?<=^[IWEF])\d{4} \d\d:\d\d:\d\d(?:\.\d+)?"  # Mooncake (glog): month and day
)
_BEGINNING = 120
"""A time further on belongs to the message."""


def written_at(line: str) -> str:
    """Empty where the line has no time."""
    match = _TIME.search(line[:_BEGINNING])
    return match[0] if match else ""
