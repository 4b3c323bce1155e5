"""The commands of a recipe's `setup`, which each node runs before its engines."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

SetupCommand = str | list[str]
"""Text is split into words as a shell splits it, and that is all: no shell runs it. A list is its words."""


def words_of(command: str | Sequence[str]) -> tuple[str, ...]:
    """Its argument list. ValueError: a quote that is not closed."""
    return tuple(shlex.split(command) if isinstance(command, str) else command)
