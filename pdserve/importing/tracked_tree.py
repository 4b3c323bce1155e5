"""Reads a tree so that nothing is forgotten: each value is taken, or left with a reason, or named in the end."""

from __future__ import annotations

from typing import Any

from pdserve.importing.launch import Effect, Note, Sourced
from pdserve.importing.yaml_tree import Tree
from pdserve.recipe.load.problems import Path, dotted

_LONGEST = 100
"""Characters of a number. Python refuses to read one of more than 4,300 digits."""


class TrackedTree:
    """A tree, and what was read of it so far."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self._done: set[Path] = set()
        self.notes: list[Note] = []

    def at(self, *path: str | int) -> Sourced:
        """The value at `path` with its place, without marking it as read."""
        return Sourced(self.tree.get(*path), dotted(path), self.tree.line(*path))

    def take(self, *path: str | int) -> Sourced | None:
        """The value at `path`, which is read with this; None where there is none, or null."""
        there = self.at(*path)
        if there.value is not None:
            self._done.add(path)
        return None if there.value is None else there

    def mapping(self, *path: str | int) -> dict[str, Sourced]:
        """The entries of the mapping at `path`; they are read with this."""
        value = self.tree.get(*path)
        if not isinstance(value, dict):
            self.take(*path)
            return {}
        self._done.add(path)
        return {key: self.at(*path, key) for key in value}

    def leave(self, path: Path, why: str, effect: Effect) -> None:
        """Everything at `path` that was not read yet is not carried over."""
        if self.tree.get(*path) is None:
            return
        if any(not self._read(leaf) for leaf in self.tree.leaves(path)):
            self.notes.append(Note(self.at(*path), why, effect))
        self._done.add(path)

    def leave_rest(self, why: str, effect: Effect) -> None:
        """All that was neither taken nor left."""
        for leaf in self.tree.leaves():
            if not self._read(leaf):
                self.leave(leaf, why, effect)

    def _read(self, path: Path) -> bool:
        return any(path[: len(done)] == done for done in self._done)


def whole(value: Any) -> int | None:
    """A number that counts something, also as text."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if not isinstance(value, str) or len(value) > _LONGEST or not value.isascii() or not value.strip().isdecimal():
        return None
    return int(value)
