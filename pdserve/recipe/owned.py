"""A flag that pdserve sets itself: what a recipe writes instead, and the value, in one row of one table.

The rules of a recipe refuse the flags of a table, and the planner renders them from the same table: a flag cannot be in
one and missing in the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pdserve.recipe.load.problems import Path
from pdserve.recipe.model import Recipe

Line = TypeVar("Line")
"""What the values of a program's flags are made of."""


@dataclass(frozen=True)
class Each:
    """A flag that is given once for each value."""

    values: tuple[str, ...]


@dataclass(frozen=True)
class Condition:
    """When pdserve sets a flag that a recipe may set otherwise."""

    text: str
    """for ..."""
    holds: Callable[[Recipe, str], bool]
    """Of a recipe and the section that has the flag (a role, or lmcache)."""
    path: Callable[[str], Path]
    """Section -> the key of the recipe that decides it."""


@dataclass(frozen=True)
class OwnedFlag(Generic[Line]):
    """One row."""

    instead: str
    """What to write instead."""
    value: Callable[[Line], Any] | None = None
    """None: the flag is never set, and refused all the same (another name of one that is). A value of None: not in
    this command line."""
    condition: Condition | None = None
    """None: it is refused in every recipe."""


def own_flags(table: Mapping[str, OwnedFlag[Line]], line: Line) -> dict[str, Any]:
    """The flags that pdserve sets in this command line, in the order of the table."""
    values = {name: flag.value(line) for name, flag in table.items() if flag.value is not None}
    return {name: value for name, value in values.items() if value is not None}
