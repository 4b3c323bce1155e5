"""A list is wanted and something else was written: `"0-3"`, `prefill, decode`, `[[0, 1], [2, 3]]`, one mapping."""

from __future__ import annotations

import re
import shlex
from typing import Any

_RANGE = re.compile(r"([0-9]+)\s*(?:-|\.\.|:)\s*([0-9]+)")
_MOST = 1024
"""Of a range that is written out."""


def meant(value: Any, item: str) -> list[Any] | None:
    """The list that `value` stands for, of items of the kind `int`, `str`, `mapping` or `command`."""
    match item:
        case "int":
            return numbers(value)
        case "mapping":
            return [value] if isinstance(value, dict) else None
        case "command" if isinstance(value, str):
            return [value] if value.strip() else None
        case "str" if isinstance(value, str):
            return _words(value)
        case "str" if isinstance(value, int) and not isinstance(value, bool):
            return [str(value)]
    return None


def numbers(value: Any) -> list[int] | None:
    """Whole numbers out of ranges, texts and lists of both: `"0-3,6"` and `["0-1", [2, 3]]`."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return [value]
    if isinstance(value, float):
        return [int(value)] if value.is_integer() else None
    if isinstance(value, list):
        parts = [numbers(item) for item in value]
        return None if None in parts else [number for part in parts for number in part or []]
    if not isinstance(value, str):
        return None
    result: list[int] = []
    for part in re.split(r"[,;\s]+", re.sub(r"\s*(-|\.\.|:)\s*", r"\1", value.strip().strip("[]"))):
        if (span := _RANGE.fullmatch(part)) is not None:
            first, last = int(span.group(1)), int(span.group(2))
            if not first <= last < first + _MOST:
                return None
            result.extend(range(first, last + 1))
        elif part.isdecimal():
            result.append(int(part))
        else:
            return None
    return result


def _words(text: str) -> list[str] | None:
    if not text.strip():
        return None
    if "," in text and not any(quote in text for quote in "\"'={"):
        return [word for word in re.split(r"[,\s]+", text) if word]
    try:
        return shlex.split(text)
    except ValueError:
        return [text]
