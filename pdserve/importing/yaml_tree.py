"""YAML of other tools: plain data with the line of every value, read as those tools read it.

They use PyYAML, thus YAML 1.1 with merge keys; a recipe of pdserve is YAML 1.2 and refuses both
(pdserve/recipe/load/yaml12.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from pdserve.errors import RecipeError
from pdserve.importing.launch import Effect, Note, SourcedValue
from pdserve.recipe.load import yaml12
from pdserve.recipe.load.problems import Path, dotted
from pdserve.recipe.load.yaml12 import MAX_DEPTH, MAX_NODES


@dataclass(frozen=True)
class Tree:
    """A document, and the lines of its paths."""

    file: str
    data: dict[str, Any]
    lines: Mapping[Path, int]

    def get(self, *path: str | int) -> Any:
        """Return the value at `path`; None where there is none."""
        current: Any = self.data
        for part in path:
            known = current if isinstance(current, dict) else range(len(current)) if isinstance(current, list) else ()
            if part not in known:
                return None
            current = current[part]
        return current

    def has(self, *path: str | int) -> bool:
        """Return whether the key is there, whatever its value."""
        parent = self.get(*path[:-1])
        return isinstance(parent, dict) and path[-1] in parent

    def line(self, *path: str | int) -> int:
        """Return the line of the path, or of the nearest one above it."""
        return next((self.lines[path[:end]] for end in range(len(path), -1, -1) if path[:end] in self.lines), 1)

    def leaves(self, path: Path = ()) -> Iterator[Path]:
        """Yield the paths of all values below `path` that hold no others; empty mappings and lists are such values."""
        value = self.get(*path)
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        empty = True
        for key, _ in inner:
            empty = False
            yield from self.leaves((*path, key))
        if empty:
            yield path


def read(text: str, file: str) -> Tree:
    """Return the one mapping in `text`. Raises RecipeError where it is none."""
    try:
        loader = yaml.SafeLoader(text)
    except yaml.YAMLError as error:  # a character that YAML forbids
        raise yaml12.not_yaml(error, text, file) from None
    try:
        node = loader.get_single_node()
        walk = _Walk(loader, file)
        data = None if node is None else walk.value(node, (), 0)
    except yaml.YAMLError as error:
        raise yaml12.not_yaml(error, text, file) from None
    finally:
        loader.dispose()
    if not isinstance(data, dict):
        raise RecipeError(
            "this file is no mapping of keys",
            where=f"{file}:1",
            todo="give a recipe of srt-slurm or of vLLM (YAML), or a shell script with a line `vllm serve`",
        )
    return Tree(file, data, walk.lines)


class _Walk:
    def __init__(self, loader: yaml.SafeLoader, file: str) -> None:
        self.loader = loader
        self.file = file
        self.lines: dict[Path, int] = {}
        self.nodes = 0

    def value(self, node: yaml.Node, path: Path, depth: int) -> Any:
        self.nodes += 1
        if depth > MAX_DEPTH or self.nodes > MAX_NODES:
            raise RecipeError(
                "nested too deeply, or too many values after its aliases are expanded",
                where=f"{self.file}:{node.start_mark.line + 1}",
                cause="an alias (*name) that contains itself, or aliases of aliases",
                todo="write the values out, without aliases",
            )
        self.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            self.loader.flatten_mapping(node)
            result: dict[str, Any] = {}
            for key_node, value_node in node.value:
                key = str(key_node.value)
                self.lines[(*path, key)] = key_node.start_mark.line + 1
                result[key] = self.value(value_node, (*path, key), depth + 1)
            return result
        if isinstance(node, yaml.SequenceNode):
            return [self.value(child, (*path, index), depth + 1) for index, child in enumerate(node.value)]
        try:
            return self.loader.construct_object(node)
        except ValueError:  # a date or a number that is none
            return str(node.value)


_LONGEST = 100
"""Characters of a number. Python refuses to read one of more than 4,300 digits."""


class TrackedTree:
    """A tree, and what was read of it so far."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self._done: set[Path] = set()
        self.notes: list[Note] = []

    def at(self, *path: str | int) -> SourcedValue:
        """Return the value at `path` with its place, without marking it as read."""
        return SourcedValue(self.tree.get(*path), dotted(path), self.tree.line(*path))

    def take(self, *path: str | int) -> SourcedValue | None:
        """Return the value at `path`, which is read with this; None where there is none, or null."""
        there = self.at(*path)
        if there.value is not None:
            self._done.add(path)
        return None if there.value is None else there

    def mapping(self, *path: str | int) -> dict[str, SourcedValue]:
        """Return the entries of the mapping at `path`; they are read with this."""
        value = self.tree.get(*path)
        if not isinstance(value, dict):
            self.take(*path)
            return {}
        self._done.add(path)
        return {key: self.at(*path, key) for key in value}

    def leave(self, path: Path, why: str, effect: Effect) -> None:
        """Note that everything at `path` that was not read yet is not carried over."""
        if self.tree.get(*path) is None:
            return
        if any(not self._read(leaf) for leaf in self.tree.leaves(path)):
            self.notes.append(Note(self.at(*path), why, effect))
        self._done.add(path)

    def leave_rest(self, why: str, effect: Effect) -> None:
        """Leave all that was neither taken nor left."""
        for leaf in self.tree.leaves():
            if not self._read(leaf):
                self.leave(leaf, why, effect)

    def _read(self, path: Path) -> bool:
        return any(path[: len(done)] == done for done in self._done)


def whole_number(value: Any) -> int | None:
    """Return a number that counts something, also as text."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if not isinstance(value, str) or len(value) > _LONGEST or not value.isascii() or not value.strip().isdecimal():
        return None
    return int(value)
