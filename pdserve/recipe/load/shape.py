"""Read from the models of a file what they allow at a path: for "did you mean" and for the rules."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pdserve.recipe.load.problems import Path
from pdserve.recipe.model import Recipe
from pdserve.roles import ENGINE_ROLES

_MULTIS = {role: {"connector": {"kind": "multi", "of": [{}]}} for role in ENGINE_ROLES}
"""A document in which a connector can have children."""


@dataclass(frozen=True)
class Shape:
    """The contents that a file may have whose top level is `root`."""

    root: type[BaseModel]

    def models_at(self, path: Path, data: Any) -> list[type[BaseModel]]:
        """The models that may stand at `path` of the document `data`; of connectors, the one whose `kind` is there."""
        return [a for a in _walk(self.root, path, data) if isinstance(a, type) and issubclass(a, BaseModel)]

    def field_at(self, path: Path, data: Any) -> FieldInfo | None:
        """The declaration of the key at `path`."""
        for model in self.models_at(path[:-1], data) if path else []:
            if (info := keys(model).get(str(path[-1]))) is not None:
                return info
        return None

    def kinds(self, path: Path) -> list[str]:
        """The kinds of the union at `path`: of connectors, or of policies."""
        return [kind for kind, _ in self.union_at(path)]

    def union_at(self, path: Path) -> list[tuple[str, type[BaseModel]]]:
        """Kind and model of each branch of the union at `path`; nothing where there is no union."""
        places = tuple(0 if isinstance(part, int) else part for part in path)
        models = self.models_at(places, _MULTIS if "of" in path else {})
        return [(kind, model) for model in models for kind in _kinds(model)] if len(models) > 1 else []

    def choices(self, path: Path, data: Any) -> list[Any]:
        """The literal values that are allowed at `path`."""
        field = self.field_at(path, data)
        return [] if field is None else _literals(field.annotation)

    def limits_at(self, path: Path, data: Any) -> dict[str, float]:
        """The bounds of the number at `path`, by pydantic's names: ge, gt, le and lt."""
        info = self.field_at(path, data)
        marks = [] if info is None else [*info.metadata, *_marks(info.annotation)]
        return {key: getattr(m, key) for m in marks for key in ("ge", "gt", "le", "lt") if hasattr(m, key)}

    def range_at(self, path: Path, data: Any) -> str | None:
        """The bounds in words, where there are two: `1 to 65535`."""
        limits = self.limits_at(path, data)
        low, high = limits.get("ge", limits.get("gt")), limits.get("le", limits.get("lt"))
        if low is None or high is None:
            return None
        return f"{low:g} to {high:g}" if "gt" not in limits else f"more than {low:g} and at most {high:g}"

    def scalars_at(self, path: Path, data: Any) -> tuple[bool, bool]:
        """Return whether text, and whether a number or boolean, may stand at `path`."""
        options = _walk(self.root, path, data)
        text = any(o is str or any(isinstance(v, str) for v in _literals(o)) for o in options)
        return text, any(o in (int, float, bool) or any(isinstance(v, int) for v in _literals(o)) for o in options)

    def places(self, key: str) -> Iterator[str]:
        """Every path of the format (`prefill.parallel.tp`) that ends in `key`; nearest to the top first."""
        level: list[tuple[str, type[BaseModel]]] = [("", self.root)]
        while level:
            below: list[tuple[str, type[BaseModel]]] = []
            for prefix, model in level:
                for name, info in keys(model).items():
                    if name == key:
                        yield prefix + name
                    below.extend((f"{prefix}{name}.", m) for m in _models(info.annotation) if name not in ("of",))
            level = below


RECIPE = Shape(Recipe)


def keys(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The keys of a model as they are written in YAML."""
    return {f.alias or name: f for name, f in model.model_fields.items()}


def value_at(path: Path, data: Any) -> Any:
    """The value at `path` of the document; None where there is nothing."""
    for part in path:
        there = isinstance(data, dict) and part in data
        if not there and not (isinstance(data, list) and isinstance(part, int) and part < len(data)):
            return None
        data = data[part]
    return data


def _walk(annotation: Any, path: Path, data: Any) -> list[Any]:
    options = list(_flatten(annotation))
    if isinstance(data, dict) and "kind" in data:
        same = [o for o in options if _is_model(o) and "kind" in keys(o) and data["kind"] in _kinds(o)]
        options = same or options
    if not path:
        return options
    head, below = path[0], path[1:]
    inner = data.get(head) if isinstance(data, dict) else None
    if isinstance(data, list) and isinstance(head, int) and head < len(data):
        inner = data[head]
    reached: list[Any] = []
    for option in options:
        if _is_model(option):
            if (info := keys(option).get(str(head))) is not None:
                reached.extend(_walk(info.annotation, below, inner))
        elif get_origin(option) is list and isinstance(head, int):
            reached.extend(_walk(get_args(option)[0], below, inner))
        elif get_origin(option) is dict:
            reached.extend(_walk(get_args(option)[1], below, inner))
    return reached


def _kinds(model: type[BaseModel]) -> list[Any]:
    return _literals(keys(model)["kind"].annotation)


def _flatten(annotation: Any) -> Iterator[Any]:
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _flatten(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for option in get_args(annotation):
            yield from _flatten(option)
    else:
        yield annotation


def _marks(annotation: Any) -> Iterator[Any]:
    """Yield what Annotated adds, at any depth of a union."""
    if get_origin(annotation) is Annotated:
        for mark in get_args(annotation)[1:]:
            yield from getattr(mark, "metadata", [mark])
        yield from _marks(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for option in get_args(annotation):
            yield from _marks(option)


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _models(annotation: Any) -> list[type[BaseModel]]:
    return [a for a in _flatten(annotation) if _is_model(a)]


def _literals(annotation: Any) -> list[Any]:
    return [v for option in _flatten(annotation) if get_origin(option) is Literal for v in get_args(option)]
