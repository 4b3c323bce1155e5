"""What to write in place of a value that is wrong: a line that works when it is typed, where one is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pdserve.recipe.load import examples, invisible, list_forms, short_forms, show, units, yaml12
from pdserve.recipe.load.problems import Line, Path, did_you_mean
from pdserve.recipe.load.shape import Shape, value_at

_BOOLEAN_WORDS = {
    "yes": "true",
    "on": "true",
    "y": "true",
    "no": "false",
    "off": "false",
    "n": "false",
    "0": "false",
    "1": "true",
}
_MAPPINGS = ("model_type", "model_attributes_type", "dict_type")
_NUMBERS = ("int_type", "float_type", "int_from_float")
_LIMITS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")
_LACKING = (True, "auto", "multi", "raw", "docker", "apptainer", "pyxis")
"""Short forms that leave something open."""
_QUOTES = str.maketrans("", "", "\u201c\u201d\u201e\u2018\u2019\u00ab\u00bb")


@dataclass(frozen=True)
class Wrong:
    """A value that pydantic refuses, where it stands, and why."""

    path: Path
    value: Any
    kinds: frozenset[str]
    data: dict[str, Any]
    shape: Shape
    spelling: str | None
    """As it was written, where that is not how it is shown."""

    @property
    def key(self) -> str:
        return next((part for part in reversed(self.path) if isinstance(part, str)), "")


class Correction(NamedTuple):
    """What is added to the message, what to do, and the line to write."""

    why: str | None = None
    todo: str | None = None
    line: Line | None = None

    def applied_to(self, what: str) -> tuple[str, str | None, Line | None]:
        return (f"{what}: {self.why}" if self.why else what), self.todo, self.line


def correction(wrong: Wrong) -> Correction:
    """The best that can be said; an empty one where nothing is known."""
    value = wrong.value
    if wrong.key == "secret":
        why = "it is the name of a variable, not its value"
        return Correction(why, None, Line(wrong.path, "HF_TOKEN", example=True))
    if show.secret_value(value) or show.secret_name(wrong.key):
        return Correction()
    for attempt in (_hidden, _variable, _mapping, _list, _boolean, _choice, _number, _limit, _text, _too_short):
        if (result := attempt(wrong)) is not None:
            return result
    return _default(wrong)


def lacking_kind(path: Path, value: Any, known: Sequence[str]) -> Line | None:
    """The line for a mapping of a union that has no `kind`."""
    if not isinstance(value, dict):
        return None
    if (whole := short_forms.with_kind(value, known)) is not None:
        return Line(path, yaml12.flow(whole))
    return Line(path, yaml12.flow({"kind": known[0], **value}), example=True) if known else None


def _hidden(wrong: Wrong) -> Correction | None:
    if not isinstance(wrong.value, str):
        return None
    if (hidden := invisible.first(wrong.value)) is not None:
        clean = yaml12.flow(_scalar(invisible.cleaned(wrong.value)))
        why = f"it has {hidden[1]} as character {hidden[0] + 1}, which looks like a space or like nothing"
        return Correction(why, None, Line(wrong.path, clean))
    plain = wrong.value.translate(_QUOTES)
    if plain != wrong.value:
        why = "its quotes are typographic ones, which are part of the text"
        return Correction(why, None, Line(wrong.path, yaml12.flow(_scalar(plain))))
    return None


def _variable(wrong: Wrong) -> Correction | None:
    """A value of `env`."""
    if len(wrong.path) < 2 or wrong.path[-2] != "env":
        return None
    if isinstance(wrong.value, bool | float):
        spelled = wrong.spelling or show.value(wrong.value)
        return Correction(None, "put it in quotes", Line(wrong.path, f'"{spelled}"'))
    if isinstance(wrong.value, list) and all(isinstance(item, str | int) for item in wrong.value):
        text = ",".join(str(item) for item in wrong.value)
        return Correction("a variable is one text", None, Line(wrong.path, f'"{text}"', example=True))
    return Correction()


def _mapping(wrong: Wrong) -> Correction | None:
    if not wrong.kinds & {*_MAPPINGS}:
        return None
    kinds = wrong.shape.kinds(wrong.path)
    whole = short_forms.meant(wrong.path, wrong.value, kinds)
    if whole is not None:
        path = wrong.path
        siblings = value_at(path[:-1], wrong.data) if path and isinstance(path[-1], int) else None
        if kinds and isinstance(siblings, list) and len(siblings) == 1 and path[-2:-1] == ("of",):
            path = path[:-2]  # a multi of one connector is that connector
        return Correction(None, None, Line(path, yaml12.flow(whole), example=wrong.value in _LACKING))
    if wrong.path == ("proxy",) and isinstance(wrong.value, int):
        return Correction(None, "remove it; the port is a key of ports", Line(("ports", "proxy"), str(wrong.value)))
    known = sorted({key for model in wrong.shape.models_at(wrong.path, wrong.data) for key in _keys(model)})
    return Correction(None, f"write its keys below it: {', '.join(known)}" if known else None)


def _list(wrong: Wrong) -> Correction | None:
    path, value = wrong.path, wrong.value
    if "list_type" in wrong.kinds:
        item = wrong.shape.items_at(path, wrong.data) or ""
        kinds = wrong.shape.kinds((*path, 0)) if item == "mapping" else []
        if kinds and path[-1:] == ("of",):
            child = short_forms.meant((*path, 0), value, kinds) if isinstance(value, str) else value
            if isinstance(child, dict) and "kind" in child:
                return Correction("one connector needs no multi", None, Line(path[:-1], yaml12.flow(child)))
        if item == "int" and value == "all":
            return Correction(None, "leave the key out: all are used then")
        whole = list_forms.meant(value, item)
        if item == "mapping" and whole is None:
            child = short_forms.meant((*path, 0), value, kinds)
            whole = None if child is None else [child]
        return Correction(None, None, None if whole is None else Line(path, yaml12.flow(whole)))
    if path and isinstance(path[-1], int) and wrong.kinds & {*_NUMBERS}:
        numbers = list_forms.numbers(value_at(path[:-1], wrong.data))
        if numbers is not None:
            return Correction(None, "list the numbers one by one", Line(path[:-1], yaml12.flow(numbers)))
    return None


def _boolean(wrong: Wrong) -> Correction | None:
    if "bool_type" not in wrong.kinds:
        return None
    value = wrong.value
    text = value.lower() if isinstance(value, str) else str(value)
    word = _BOOLEAN_WORDS.get(text, text)
    return Correction(None, None, Line(wrong.path, word)) if word in ("true", "false") else None


def _choice(wrong: Wrong) -> Correction | None:
    if "literal_error" not in wrong.kinds:
        return None
    allowed = wrong.shape.choices(wrong.path, wrong.data)
    if isinstance(wrong.value, str):
        if (other := _OTHER_WORDS.get(wrong.value.lower())) in allowed:
            return Correction(None, _BY_MAKER if other == "cuda" else None, Line(wrong.path, str(other)))
        if (guess := did_you_mean(wrong.value, [str(a) for a in allowed])) is not None and guess in allowed:
            return Correction(None, f"did you mean {guess}?")
    if len(allowed) == 1:
        return Correction(None, None, Line(wrong.path, yaml12.flow(allowed[0])))
    if wrong.value in (True, "true", "on", "yes") and "on-failure" in allowed:
        return Correction(None, None, Line(wrong.path, "on-failure"))
    return None


_OTHER_WORDS = {
    "gpu": "cuda",
    "nvidia": "cuda",
    "amd": "rocm",
    "hip": "rocm",
    "always": "on-failure",
    "no": "never",
    "pd": "disaggregated",
    "p/d": "disaggregated",
    "singularity": "apptainer",
    "podman": "docker",
    "enroot": "pyxis",
    "roce": "rdma",
    "ib": "rdma",
    "infiniband": "rdma",
}
"""What others call it."""
_BY_MAKER = "cuda is for NVIDIA, rocm for AMD"


def _number(wrong: Wrong) -> Correction | None:
    if not wrong.kinds & {*_NUMBERS}:
        return None
    whole, value = "float_type" not in wrong.kinds, wrong.value
    if isinstance(value, float) and value.is_integer() and wrong.kinds & {"int_type", "int_from_float"}:
        return Correction(None, None, Line(wrong.path, str(int(value))))
    if not isinstance(value, str):
        return None
    number = units.meant(value, wrong.key, whole=whole)
    if number is None:
        return None
    if number.value is None:
        return Correction(number.why, None, _default(wrong).line)
    line = Line(wrong.path, f"{number.value}", example=not number.exact)
    return Correction(number.why or None, None if number.why else "remove the quotes", line)


def _limit(wrong: Wrong) -> Correction | None:
    if not wrong.kinds & {*_LIMITS} or not isinstance(wrong.value, int | float):
        return None
    limits = wrong.shape.limits_at(wrong.path, wrong.data)
    if limits.get("le") == 1 and 1 < wrong.value <= 100 and wrong.value == int(wrong.value):
        return Correction("it is a share, not a percentage", None, Line(wrong.path, f"{wrong.value / 100:g}"))
    result = _default(wrong)
    if result.line is None and wrong.kinds & {"greater_than_equal", "less_than_equal"}:
        nearest = limits.get("ge") if "greater_than_equal" in wrong.kinds else limits.get("le")
        return Correction(None, None, None if nearest is None else Line(wrong.path, f"{nearest:g}", example=True))
    return result


def _text(wrong: Wrong) -> Correction | None:
    value = wrong.value
    if "string_type" in wrong.kinds and isinstance(value, bool | int | float):
        return Correction(None, "put it in quotes", Line(wrong.path, f'"{wrong.spelling or show.value(value)}"'))
    if "string_type" in wrong.kinds and isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        return Correction("the key takes one text", None, Line(wrong.path, yaml12.flow(value[0])))
    if "string_pattern_mismatch" in wrong.kinds and isinstance(value, str):
        if wrong.key == "name" and (fitting := as_name(value)):
            return Correction(None, None, Line(wrong.path, yaml12.flow(fitting)))
        if wrong.key == "endpoint":
            return Correction(None, None, Line(wrong.path, yaml12.flow(f"http://{value}")))
    return None


def _too_short(wrong: Wrong) -> Correction | None:
    if "too_short" not in wrong.kinds or not isinstance(wrong.value, list):
        return None
    if wrong.path[-1:] == ("of",) and len(wrong.value) == 1 and isinstance(wrong.value[0], dict):
        return Correction(
            "one connector needs no multi", None, Line(wrong.path[:-1], yaml12.flow(wrong.value[0]))
        )  # fmt: skip
    if wrong.path[-1:] == ("of",):
        children = [{"kind": "mooncake"}, {"kind": "lmcache-mp"}]
        return Correction(None, None, Line(wrong.path, yaml12.flow(children), example=True))
    result = _default(wrong)
    return result if result.line is not None else Correction(None, "leave the key out, or name something")


def _default(wrong: Wrong) -> Correction:
    return Correction(None, None, examples.value(wrong.path, wrong.data, wrong.shape))


def as_name(text: str) -> str:
    """The name of a deployment that is closest to `text`; empty where nothing of it can be in one."""
    kept = "".join(c if c.isascii() and c.isalnum() else "-" for c in text.lower())
    return "-".join(part for part in kept.split("-") if part)[:48].strip("-")


def _scalar(text: str) -> Any:
    try:
        return yaml12.scalar(text)
    except ValueError:
        return text


def _keys(model: Any) -> list[str]:
    return [info.alias or name for name, info in model.model_fields.items()]
