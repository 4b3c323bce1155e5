"""A line of a trace, and the error that names it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from pdserve.errors import RecipeError

FORMATS = "docs/guides/bench.md has the formats"
_Row = TypeVar("_Row", bound=BaseModel)


@dataclass(frozen=True)
class TraceLine:
    """Read as JSON."""

    place: str
    """`trace.jsonl:7`."""
    number: int
    row: Mapping[str, Any]

    def read(self, kind: type[_Row], row: Mapping[str, Any] | None = None) -> _Row:
        """The line, or this part of it, in the form of `kind`. Raises RecipeError."""
        try:
            return kind.model_validate(self.row if row is None else row)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            key = ".".join(map(str, first["loc"]))
            raise self.bad(": ".join(filter(None, (key, first["msg"].removeprefix("Value error, "))))) from None

    def bad(self, cause: str, todo: str = FORMATS) -> RecipeError:
        """What is wrong with it."""
        return RecipeError("this line is no request of a trace", where=self.place, cause=cause, todo=todo)
