"""Text where a number is wanted: `64GiB`, `1h`, `80%`, `8,000`. What the key counts, and the number to write."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

_TEXT = re.compile(r"([-+]?[0-9]+(?:[ ,._][0-9]+)*|[-+]?\.[0-9]+)\s*([A-Za-z%]*)")
_CLOCK = re.compile(r"([0-9]+):([0-5]?[0-9]):([0-5]?[0-9])")
_GROUPED = re.compile(r"[-+]?[0-9]{1,3}([ ,_])[0-9]{3}(\1[0-9]{3})*")
_TIMES = {
    **dict.fromkeys(("ms", "millisecond", "milliseconds"), 0.001),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3600),
    **dict.fromkeys(("d", "day", "days"), 86400),
    **dict.fromkeys(("w", "week", "weeks"), 7 * 86400),
}
_SIZES = {
    **dict.fromkeys(("b", "byte", "bytes"), 1),
    **dict.fromkeys(("k", "kb", "kib"), 2**10),
    **dict.fromkeys(("m", "mb", "mib"), 2**20),
    **dict.fromkeys(("g", "gb", "gib"), 2**30),
    **dict.fromkeys(("t", "tb", "tib"), 2**40),
}
"""GB and the like are read as GiB: who writes 64GB for memory means what `free -g` shows."""


@dataclass(frozen=True)
class _Kind:
    words: str
    """What the number counts, for messages."""
    base: float
    units: Mapping[str, float]


_KINDS = (
    (re.compile(r"(^|_)seconds$"), _Kind("seconds", 1, _TIMES)),
    (re.compile(r"(^|_)days$"), _Kind("days", 86400, _TIMES)),
    (re.compile(r"_gi?b$"), _Kind("GiB", 2**30, _SIZES)),
    (re.compile(r"_mib$"), _Kind("MiB", 2**20, _SIZES)),
    (re.compile(r"_bytes$"), _Kind("bytes", 1, _SIZES)),
)
_THOUSANDS = {"k": 1_000.0, "m": 1_000_000.0}


@dataclass(frozen=True)
class Number:
    """What was meant. `value` None: a unit that this key does not count."""

    why: str
    value: float | int | None
    exact: bool = True
    """Otherwise one number of several that may have been meant."""


def meant(text: str, key: str, *, whole: bool) -> Number | None:
    """The number that `text` means at `key`; None where it is no number with a unit. `whole`: the key takes no
    fraction."""
    if key.endswith("_seconds") and (clock := _CLOCK.fullmatch(text.strip())) is not None:
        hours, minutes, seconds = (int(part) for part in clock.groups())
        return Number("the key counts seconds", 3600 * hours + 60 * minutes + seconds)
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        return None
    value, unit = _plain(match.group(1)), match.group(2).lower()
    if value is None:
        return None
    kind = next((kind for pattern, kind in _KINDS if pattern.search(key)), None)
    if unit == "%":
        return Number("a share is written without %", _tidy(value / 100, whole))
    if not unit:
        separated = bool(re.search("[ ,_]", match.group(1)))
        return Number("a number has no separators, and a decimal point" if separated else "", _tidy(value, whole))
    if kind is None:
        factor = _THOUSANDS.get(unit)
        return Number("the key takes a plain number", None if factor is None else int(value * factor), exact=False)
    factor = kind.units.get(unit)
    why = f"the key counts {'whole ' if whole else ''}{kind.words} and takes no unit"
    if factor is None:
        return Number(why, None)
    amount = value * factor / kind.base
    number = _tidy(amount, whole)
    return Number(why, math.ceil(amount) if number is None else number, exact=number is not None)


def _plain(digits: str) -> float | None:
    if _GROUPED.fullmatch(digits):
        digits = re.sub("[ ,_]", "", digits)
    digits = digits.replace(",", ".")
    try:
        return float(digits)
    except ValueError:
        return None


def _tidy(value: float, whole: bool) -> float | int | None:
    if value == int(value):
        return int(value)
    return None if whole else float(f"{value:.6g}")
