"""A document -> the model of its file, or everything that is wrong with it at once."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticUndefined

from pdserve.recipe.flags import known_flags, where_instead
from pdserve.recipe.load import show, yaml12
from pdserve.recipe.load.problems import Line, Path, Problem, did_you_mean
from pdserve.recipe.load.shape import RECIPE, Shape, keys, value_at
from pdserve.roles import ENGINE_ROLES

_KINDS = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}
_COUNTED = {"_seconds": "seconds", "days": "days", "_gb": "GiB", "_mib": "MiB", "_bytes": "bytes"}
"""The end of a key and what it counts."""
_NUMBER = re.compile(r"(-?[0-9]+)(?:\.0*)?")
"""A whole number, and zeros behind it."""
_LIMITS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}
_PATTERNS = {
    "name": "a name of lower-case letters, digits and hyphens, 48 characters at most",
    "secret": "the name of an environment variable",
}
_ROUNDS = 4
_NULL_IS_DATA = ("args", "extra_args", "l2", "config")
Model = TypeVar("Model", bound=BaseModel)


def validate(
    root: type[Model],
    data: dict[str, Any],
    known_bad: set[Path],
    stand_ins: Mapping[str, Any],
    spellings: Mapping[Path, str] | None = None,
) -> tuple[Model | None, list[Problem]]:
    """Return the model, and what pydantic objects to. Where something is wrong the model is made of the rest, so that
    rules can be applied as well and all is reported at once; None where not even that is possible. `stand_ins`: valid
    values for required keys that are wrong or missing, by their names; `spellings`: numbers as they were written."""
    shape = Shape(root)
    problems: list[Problem] = []
    bad = set(known_bad)
    rest = data
    for _ in range(_ROUNDS):
        try:
            return root.model_validate(rest), problems
        except ValidationError as failure:
            fresh = explain_errors(failure, rest, shape, spellings)
        renamed = {p.meant for p in fresh}
        problems += [p for p in fresh if p.path not in renamed and not any(p.concerns(b) for b in bad)]
        bad = bad.union(*(p.spoils for p in fresh))
        for problem in fresh:
            if not problem.path:
                return None, problems
            path = _droppable(problem.path)
            required = (info := shape.field_at(path, rest)) is not None and info.is_required()
            rest = _replace_at(rest, path, stand_ins.get(str(path[-1])) if required else None)
    return None, problems


def _droppable(path: Path) -> Path:
    """Return what to leave out when `path` is wrong: half a connector means nothing."""
    return path[: path.index("connector") + 1] if "connector" in path else path


def _replace_at(data: Any, path: Path, stand_in: Any) -> Any:
    """A copy of `data` that lacks `path`, or has `stand_in` there."""
    head, below = path[0], path[1:]
    if isinstance(data, dict):
        if below:
            return {key: _replace_at(value, below, stand_in) if key == head else value for key, value in data.items()}
        rest = {key: value for key, value in data.items() if key != head}
        return rest if stand_in is None else {**rest, head: stand_in}
    if isinstance(data, list) and isinstance(head, int) and head < len(data):
        changed = [_replace_at(data[head], below, stand_in)] if below else []
        return [*data[:head], *changed, *data[head + 1 :]]
    return data


def reset_nulls(data: dict[str, Any], shape: Shape = RECIPE) -> None:
    """Drop the keys that are null, so that they have their defaults; inside flags and raw JSON null is data. A key that
    the format does not have stays, for the validation to refuse it: a typo has no meaning, whatever its value."""
    _reset(data, data, (), shape)


def _reset(data: Any, whole: dict[str, Any], path: Path, shape: Shape) -> None:
    if isinstance(data, dict):
        for key in [k for k, v in data.items() if v is None and not _unknown((*path, k), whole, shape)]:
            del data[key]
        for key, value in data.items():
            if key not in _NULL_IS_DATA:
                _reset(value, whole, (*path, key), shape)
    elif isinstance(data, list):
        for index, value in enumerate(data):
            _reset(value, whole, (*path, index), shape)


def _unknown(path: Path, whole: dict[str, Any], shape: Shape) -> bool:
    return bool(shape.models_at(path[:-1], whole)) and shape.field_at(path, whole) is None


@dataclass(frozen=True)
class _Document:
    """The document that was validated, and what it should look like."""

    data: dict[str, Any]
    shape: Shape
    spellings: Mapping[Path, str]

    def spelling(self, path: Path) -> str | None:
        """The value at `path` as it was written, where that is not how it is shown."""
        return self.spellings.get(path)

    def about(self, path: Path) -> str | None:
        """Return what the key at `path` is for, by its declaration."""
        info = self.shape.field_at(path, self.data)
        return info.description.rstrip(".") if info is not None and info.description else None


def explain_errors(
    error: ValidationError, data: dict[str, Any], shape: Shape = RECIPE, spellings: Mapping[Path, str] | None = None
) -> list[Problem]:
    """One problem for each place of the document that pydantic objects to."""
    document = _Document(data, shape, spellings or {})
    at: dict[Path, list[ErrorDetails]] = defaultdict(list)
    for detail in error.errors(include_url=False, include_context=True):
        at[_path(detail["loc"], data)].append(detail)
    collected = []
    for path, details in at.items():
        deeper = [p for p in at if len(p) > len(path) and p[: len(path)] == path]
        if deeper and isinstance(value_at(path, data), dict | list) and all(d["type"] in _KINDS for d in details):
            continue  # other branches of a union; the branch that was meant reports what is wrong inside
        collected.append(_problem(path, details, document))
    return collected


def _problem(path: Path, details: list[ErrorDetails], document: _Document) -> Problem:
    kinds = {d["type"] for d in details}
    detail = details[0]
    if "key" in kinds or (detail["loc"] and detail["loc"][-1] == "[key]"):
        return _bad_key(path)
    if kinds == {"extra_forbidden"}:
        return _unknown_key(path, document)
    if "missing" in kinds:
        allowed = document.shape.choices(path, document.data)
        line = Line(path, yaml12.flow(allowed[0])) if len(allowed) == 1 else None
        todo = None if line else document.about(path) or f"add it: `{path[-1]}: ...`"
        return Problem(path, "missing", todo, write=line)
    value = value_at(path, document.data)
    shown = show.redact_value(path[-1] if path else "", value)
    if "union_tag_not_found" in kinds:
        known = document.shape.kinds(path)
        what = f"a {_union(path)} needs a `kind`: one of {_list(known)}"
        whole = {"kind": known[0], **value} if isinstance(value, dict) else {"kind": known[0]}
        return Problem(path, what, write=Line(path, yaml12.flow(whole), example=True))
    if "union_tag_invalid" in kinds:
        given = value.get("kind") if isinstance(value, dict) else None
        known = document.shape.kinds(path)
        guess = _kind(str(given), known)
        what = f"no {_union(path)} is called {show.value(given)}; there are {_list(known)}"
        raw = "for another connector of vLLM: `kind: raw`, with its mapping as `config`" if "raw" in known else None
        kind_path = (*path, "kind")
        return Problem(kind_path, what, f"did you mean {guess}?" if guess else raw or "take one of them")
    return _wrong_value(path, details, value, shown, document)


def _kind(word: str, kinds: Sequence[str]) -> str | None:
    """Return the kind that a word means: a slip of its name, or vLLM's name of the class."""
    name = re.sub(r"(connector)?(v1)?$", "", word.lower())
    return next((kind for kind in kinds if kind.replace("-", "") == name), None) or did_you_mean(word, kinds)


def _union(path: Path) -> str:
    """Return the branches of the union at `path`, in words."""
    return "policy" if path[:2] == ("proxy", "routing") else "connector"


def _wrong_value(path: Path, details: list[ErrorDetails], value: Any, shown: str, document: _Document) -> Problem:
    expected: list[str] = []
    for detail in details:
        kind = detail["type"]
        context = detail.get("ctx", {})
        if kind in _KINDS:
            expected.append(_KINDS[kind])
        elif kind in _LIMITS:
            words, key = _LIMITS[kind]
            expected.append(document.shape.range_at(path, document.data) or f"{words} {context[key]:g}")
        elif kind == "literal_error":
            allowed = document.shape.choices(path, document.data)
            prefix = "one of " if len(allowed) > 1 else ""
            expected.append(f"{prefix}{_list(allowed)}" if allowed else str(context.get("expected", "another value")))
        elif kind in ("too_short", "string_too_short"):
            least = context.get("min_length", 1)
            expected.append("something" if kind == "string_too_short" else f"a list of at least {least}")
        elif kind == "string_pattern_mismatch":
            expected.append(_PATTERNS.get(str(path[-1]) if path else "", f"text like {context.get('pattern')}"))
        elif kind == "finite_number":
            expected.append("a finite number")
        else:
            expected.append(detail["msg"])
    if path and len(path) >= 2 and path[-2] == "env":
        expected = ["text, a whole number or {secret: NAME}"]
    if isinstance(value, list) and "too_short" in {d["type"] for d in details}:
        shown = f"{len(value) or 'an empty one'}"
    what = f"expected {', '.join(dict.fromkeys(expected[:-1]))}{' or ' if expected[1:] else ''}{expected[-1]}"
    spelling = document.spelling(path)
    if spelling is not None and "${" in spelling:
        what = f"{what}, got {shown} from {spelling}"
        return Problem(path, what, "export another value", write=None)
    if isinstance(value, str) and path:
        counted = [unit for end, unit in _COUNTED.items() if str(path[-1]).endswith(end)]
        what += "".join(f" of {unit}, without the unit" for unit in counted)
    todo, line = _correction(path, {d["type"] for d in details}, value, document)
    return Problem(path, f"{what}, got {shown}", todo, write=line)


def _correction(path: Path, kinds: set[str], value: Any, document: _Document) -> tuple[str | None, Line | None]:
    """Return what to do about a wrong value, and the line to write: the closest value that is right, else a default,
    or what the key is for."""
    secret = show.secret_value(value) or show.secret_name(str(path[-1]) if path else "")
    variable = path[-2:-1] == ("env",) and isinstance(value, bool | float)
    if not secret and (variable or ("string_type" in kinds and isinstance(value, bool | int | float))):
        quoted = document.spelling(path) or show.value(value)
        return "put it in quotes", Line(path, f'"{quoted}"')
    if not secret and "literal_error" in kinds:
        allowed = document.shape.choices(path, document.data)
        if len(allowed) == 1:
            return None, Line(path, yaml12.flow(allowed[0]))
        # gpu is no slip of cpu.
        if guess := did_you_mean(str(value), [str(each) for each in allowed], least=0.7):
            return f"did you mean {guess}?", None
    if kinds & {"model_type", "model_attributes_type", "dict_type"}:
        if isinstance(value, str) and (kind := _kind(value, document.shape.kinds(path))):
            return None, Line(path, yaml12.flow({"kind": kind}))
        known = sorted({key for model in document.shape.models_at(path, document.data) for key in keys(model)})
        return (f"write its keys below it: {', '.join(known)}" if known else None), None
    if not secret and kinds & {"int_type", "float_type", "int_from_float"} and (match := _NUMBER.fullmatch(str(value))):
        return None, Line(path, match[1])
    info = document.shape.field_at(path, document.data)
    default = None if info is None or info.default is PydanticUndefined else info.default
    if isinstance(default, str | int | float) and not isinstance(default, bool) and default and path[-1] != "secret":
        whole = int(default) if isinstance(default, float) and default.is_integer() else default
        return None, Line(path, yaml12.flow(whole), example=True)
    return document.about(path) or "correct the value, or leave the key out", None


def _unknown_key(path: Path, document: _Document) -> Problem:
    """A key that the format does not have, and the one that was probably meant."""
    key, parent = str(path[-1]), path[:-1]
    known = [k for model in document.shape.models_at(parent, document.data) for k in keys(model)]
    guess = did_you_mean(key, known)
    role = parent[0] if len(parent) == 1 and parent[0] in (*ENGINE_ROLES, "engine") else None
    flag = key.replace("_", "-").removeprefix("--")
    places = [place for place in document.shape.places(key) if place != ".".join(map(str, path))]
    inside = [place for place in places if parent and place.startswith(f"{parent[0]}.")]
    if guess and guess == key.replace("-", "_").lower():
        todo = f"did you mean {guess}?"
    elif role and flag in known_flags():
        todo = where_instead(flag, str(role)) or f"vLLM flags go under {role}.args: {flag}"
    elif guess or places:
        todo = f"did you mean {(inside or places)[0] if places else guess}?"
    else:
        todo = f"known here: {_list(sorted(set(known)))}"
    return Problem(path, "unknown key", todo, meant=(*parent, guess) if guess is not None else None)


def _bad_key(path: Path) -> Problem:
    key, parent = str(path[-1]), path[-2] if len(path) > 1 else ""
    if parent == "args":
        flag = key.lstrip("-").replace("_", "-").lower()
        if flag.startswith("no-") and flag[3:] in known_flags():
            flag = f"{flag[3:]}: false"
        elif "." in key:
            return Problem(path, "not the name of a flag", f"write a mapping below {flag.split('.')[0]}:")
        return Problem(path, "flags are written with hyphens and without the leading dashes", f"write {flag}")
    if parent == "requires":
        return Problem(path, "versions can be required of vllm, lmcache and mooncake", "remove it")
    fitting = re.sub(r"\W", "_", key, flags=re.ASCII)
    todo = f"did you mean {fitting}?" if fitting and not fitting[0].isdigit() else "begin it with a letter"
    return Problem(path, "not the name of an environment variable: letters, digits and _ only", todo)


def _path(loc: tuple[int | str, ...], data: Any) -> Path:
    """The document's path for pydantic's: without the names of union branches and the mark of a bad key."""
    path: list[int | str] = []
    current = data
    for i, part in enumerate(loc):
        last = i == len(loc) - 1
        if _has(current, part):
            path.append(part)
            current = current[part]
        elif isinstance(current, dict) and last and part != "[key]" and not _branch(str(part), current):
            path.append(part)  # a missing key
    return tuple(path)


def _has(container: Any, part: int | str) -> bool:
    if isinstance(container, dict):
        return part in container
    return isinstance(container, list) and isinstance(part, int) and part < len(container)


def _branch(part: str, current: dict[str, Any]) -> bool:
    return part == current.get("kind") or part in ("str", "int", "SecretRef") or part.startswith(("list[", "dict["))


def _list(words: list[Any]) -> str:
    texts = [str(w) for w in words]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
