"""Find what to write in place of a wrong value: another word of those that are allowed, the kind of a connector, a
number without its unit or quotes, a text in quotes. Where nothing is that close, what the key is for."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic_core import PydanticUndefined

from pdserve.recipe.load import show, yaml12
from pdserve.recipe.load.problems import Line, Path, did_you_mean
from pdserve.recipe.load.shape import Shape, keys

_BOOLEANS = {"yes": "true", "on": "true", "1": "true", "no": "false", "off": "false", "0": "false"}
_MAPPINGS = {"model_type", "model_attributes_type", "dict_type"}
_NUMBERS = {"int_type", "float_type", "int_from_float"}
_CLASSES = (
    ("mooncake", re.compile(r"mooncake_?connector(v1)?")),
    ("nixl", re.compile(r"nixl_?connector(v1)?")),
    ("lmcache-mp", re.compile(r"lmcache(_?mp)?(_?connector)?(v1)?|lmcache[_-]mp")),
    ("multi", re.compile(r"multi_?connector")),
)
"""vLLM's names of connectors."""
_NUMBER = re.compile(r"([-+]?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)) ?([A-Za-z]*)")
_TIMES = {"ms": 0.001, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "hour": 3600, "d": 86400, "day": 86400}
_SIZES = {"b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
"""By their first letter. GB and the like are read as GiB: who writes 64GB for memory means what `free -g` shows."""
_COUNTED: tuple[tuple[str, str, float, Mapping[str, float]], ...] = (
    ("_seconds", "seconds", 1, _TIMES),
    ("days", "days", 86400, _TIMES),
    ("_gb", "GiB", 2**30, _SIZES),
    ("_mib", "MiB", 2**20, _SIZES),
    ("_bytes", "bytes", 1, _SIZES),
)
"""End of a key; what it counts; how many of the smallest unit that is; units."""


@dataclass(frozen=True)
class Wrong:
    """A value that pydantic refuses, where it stands, and why."""

    path: Path
    value: Any
    kinds: frozenset[str]
    """pydantic's types of the errors."""
    data: dict[str, Any]
    shape: Shape
    spelling: str | None
    """As it was written, where that is not how it is shown."""

    @property
    def key(self) -> str:
        return next((part for part in reversed(self.path) if isinstance(part, str)), "")


class Correction(NamedTuple):
    """A correction: what is added to the message, what to do, and the line to write."""

    why: str | None = None
    todo: str | None = None
    line: Line | None = None


def correction(wrong: Wrong) -> Correction:
    """Return the closest value that is right, else a default, or what the key is for."""
    if not show.secret_value(wrong.value) and not show.secret_name(wrong.key):
        for attempt in (_text, _mapping, _word, _number):
            if (result := attempt(wrong)) is not None:
                return result
    info = wrong.shape.field_at(wrong.path, wrong.data)
    default = None if info is None or info.default is PydanticUndefined else info.default
    if isinstance(default, str | int | float) and default != "" and wrong.key != "secret":
        whole = int(default) if isinstance(default, float) and default.is_integer() else default
        return Correction(None, None, Line(wrong.path, yaml12.flow(whole), example=True))
    return Correction(todo=about(wrong.path, wrong.data, wrong.shape) or "correct the value, or leave the key out")


def about(path: Path, data: Any, shape: Shape) -> str | None:
    """Return what the key at `path` is for, by its declaration."""
    info = shape.field_at(path, data)
    return info.description.rstrip(".") if info is not None and info.description else None


def kind_of(word: str, kinds: Sequence[str]) -> str | None:
    """The kind that a word means: its own name, a slip of it, or vLLM's name of the class."""
    by_class = next((kind for kind, pattern in _CLASSES if pattern.fullmatch(word.lower())), None)
    return by_class if by_class in kinds else did_you_mean(word, kinds)


def as_name(text: str) -> str:
    """The name of a deployment that is closest to `text`; empty where nothing of it can be in one."""
    kept = "".join(c if c.isascii() and c.isalnum() else "-" for c in text.lower())
    return "-".join(part for part in kept.split("-") if part)[:48].strip("-")


def _mapping(wrong: Wrong) -> Correction | None:
    if not wrong.kinds & _MAPPINGS:
        return None
    kind = kind_of(wrong.value, wrong.shape.kinds(wrong.path)) if isinstance(wrong.value, str) else None
    if kind is not None:
        return Correction(line=Line(wrong.path, yaml12.flow({"kind": kind})))
    known = sorted({key for model in wrong.shape.models_at(wrong.path, wrong.data) for key in keys(model)})
    return Correction(todo=f"write its keys below it: {', '.join(known)}") if known else None


def _word(wrong: Wrong) -> Correction | None:
    """One of a few words."""
    if "bool_type" in wrong.kinds:
        text = str(wrong.value).lower()
        word = _BOOLEANS.get(text, text)
        return Correction(line=Line(wrong.path, word)) if word in ("true", "false") else None
    if "literal_error" not in wrong.kinds:
        return None
    allowed = wrong.shape.choices(wrong.path, wrong.data)
    if len(allowed) == 1:
        return Correction(line=Line(wrong.path, yaml12.flow(allowed[0])))
    # gpu is no slip of cpu.
    guess = did_you_mean(str(wrong.value), [str(each) for each in allowed], least=0.7)
    return None if guess is None else Correction(todo=f"did you mean {guess}?")


def _number(wrong: Wrong) -> Correction | None:
    """A number in quotes, with a unit, or with a fraction that is none."""
    if not wrong.kinds & _NUMBERS or isinstance(wrong.value, bool | list | dict):
        return None
    match = _NUMBER.fullmatch(str(wrong.value))
    if match is None:
        return None
    amount, unit = float(match.group(1)), match.group(2).lower()
    whole = "float_type" not in wrong.kinds
    if not unit:
        fits = amount.is_integer() or not whole
        return Correction(None, None, Line(wrong.path, _number_text(amount))) if fits else None
    for end, words, base, units in _COUNTED:
        if wrong.key.endswith(end):
            factor = units.get(unit) or units.get(unit.removesuffix("s"))
            factor = factor or (units.get(unit[0]) if units is _SIZES and unit[1:] in ("b", "ib") else None)
            amount = math.inf if factor is None else amount * factor / base
            exact = amount.is_integer() or not whole
            line = None if factor is None else Line(wrong.path, _number_text(amount if exact else math.ceil(amount)))
            return Correction(f"the key counts {words} and takes no unit", None if line else "leave the unit out", line)
    return None


def _number_text(number: float) -> str:
    return str(int(number)) if number == int(number) else f"{number:.6g}"


def _text(wrong: Wrong) -> Correction | None:
    value = wrong.value
    variable = wrong.path[-2:-1] == ("env",) and isinstance(value, bool | float)
    if variable or ("string_type" in wrong.kinds and isinstance(value, bool | int | float)):
        quoted = Line(wrong.path, f'"{wrong.spelling or show.value(value)}"')
        return Correction(None, "put it in quotes", quoted)
    if "string_pattern_mismatch" in wrong.kinds and wrong.key == "name" and (fitting := as_name(str(value))):
        return Correction(line=Line(wrong.path, yaml12.flow(fitting)))
    return None
