"""A document -> the model of its file, or everything that is wrong with it at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from pdserve.recipe.load import explain
from pdserve.recipe.load.problems import Path, Problem
from pdserve.recipe.load.shape import RECIPE, Shape

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
    """The model, and what pydantic objects to. Where something is wrong the model is made of the rest, so that rules
    can be applied as well and all is reported at once; None where not even that is possible. `stand_ins`: valid
    values for required keys that are wrong or missing, by their names; `spellings`: numbers as they were written."""
    shape = Shape(root)
    problems: list[Problem] = []
    bad = set(known_bad)
    rest = data
    for _ in range(_ROUNDS):
        try:
            return root.model_validate(rest), problems
        except ValidationError as failure:
            fresh = explain.problems(failure, rest, shape, spellings)
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
