"""The variants of a file of srt-slurm: `base` with `override_*` and `zip_override_*`, and `sweep` with {placeholders}.

Its rules (docs/overrides.md and docs/sweeps.md there): mappings are merged key by key, null removes a key, lists and
values replace; the lists of a zip_override are walked side by side, a list of one is for all, a list of lists holds
literal ones; a sweep is every combination.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from pdserve.errors import RecipeError
from pdserve.importing.command_line import typed_value
from pdserve.importing.launch import Note, SourcedValue
from pdserve.importing.yaml_tree import Tree
from pdserve.recipe.load.problems import Path

_OVERRIDE, _ZIP, _SCHEMA = "override_", "zip_override_", "schema"


def variants(tree: Tree) -> dict[str, Tree]:
    """Return every variant by its name; one without a name where the file has one recipe only."""
    named = dict(_overridden(tree)) if tree.has("base") else {"": tree}
    return {name: variant for base, whole in named.items() for name, variant in _swept(base, whole)}


def has_several(tree: Tree) -> bool:
    """Return whether the file is more than one recipe, for srtctl too."""
    return tree.has("base") or isinstance(tree.get("sweep"), dict)


def unlike_srtctl(tree: Tree) -> Iterator[Note]:
    """Name what srtctl does with the sections of variants, and a sweep of pdserve does not."""
    top = tree.get("base") if tree.has("base") else tree.data
    sweep = top.get("sweep") if isinstance(top, dict) else None
    if tree.has("base"):
        for key in tree.data:
            if key not in ("base", _SCHEMA) and not key.startswith((_OVERRIDE, _ZIP)):
                why = f"srtctl reads base, {_OVERRIDE}... and {_ZIP}... of such a file, and nothing else"
                yield Note(SourcedValue(None, key, tree.line(key)), why, "confirm")
    if tree.has("base") and len(tree.data) > 1:
        yield Note(
            SourcedValue(None, "base", tree.line("base")),
            "srtctl runs it only when it is asked for: no point is it",
            "replaced",
        )
    for key, values in (sweep if isinstance(sweep, dict) else {}).items():
        at = SourcedValue(None, f"sweep.{key}", tree.line("sweep", key))
        if f"{{{key}}}" not in str({name: value for name, value in top.items() if name != "sweep"}):
            yield Note(at, f"nothing has {{{key}}}: its values make no difference", "replaced")
        elif any(isinstance(value, bool) for value in (values if isinstance(values, list) else [values])):
            yield Note(
                at, "srtctl writes the text True or False after the flag; here it is the flag, or none", "replaced"
            )


def _overridden(tree: Tree) -> Iterator[tuple[str, Tree]]:
    base = _below(tree, ("base",))
    if tree.has(_SCHEMA) and not base.has(_SCHEMA):  # beside base it is that of every variant
        lines = {**base.lines, (_SCHEMA,): tree.line(_SCHEMA)}
        base = Tree(base.file, {_SCHEMA: tree.get(_SCHEMA), **base.data}, lines)
    yield "base", base
    for key, value in tree.data.items():
        if key.startswith((_OVERRIDE, _ZIP)) and not isinstance(value, dict):
            todo = "give it what differs from base, as a mapping, or remove it"
            raise RecipeError(f"{key} is no mapping", where=f"{tree.file}:{tree.line(key)}", todo=todo)
        if key.startswith(_OVERRIDE):
            yield key, _merged(base, _below(tree, (key,)))
        elif key.startswith(_ZIP):
            over = _below(tree, (key,))
            _check_lists(tree, key, over.data)
            for index in range(_width(over.data)):
                yield f"{key}[{index}]", _merged(base, Tree(tree.file, _sliced(over.data, index), over.lines))


def _swept(name: str, tree: Tree) -> Iterator[tuple[str, Tree]]:
    sweep = tree.get("sweep")
    if not isinstance(sweep, dict) or not sweep:
        yield name, tree
        return
    values = [value if isinstance(value, list) else [value] for value in sweep.values()]
    if empty := [key for key, value in zip(sweep, values, strict=True) if not value]:
        where = f"{tree.file}:{tree.line('sweep', empty[0])}"
        raise RecipeError(f"sweep.{empty[0]} has no value, so there is no variant", where=where, todo="give it one")
    for combination in itertools.product(*values):
        chosen = dict(zip(sweep, combination, strict=True))
        label = ",".join(f"{key}={value}" for key, value in chosen.items())
        data = {key: _filled(value, chosen) for key, value in tree.data.items() if key != "sweep"}
        yield f"{name}:{label}" if name else label, Tree(tree.file, data, tree.lines)


def _check_lists(tree: Tree, key: str, data: Any) -> None:
    """Check that every list has the same length, or one value for all, as srtctl does. Raises RecipeError."""
    lengths = set(_lengths(data))
    where = f"{tree.file}:{tree.line(key)}"
    if 0 in lengths or not lengths:
        what = "has an empty list" if lengths else "has no list, so there is nothing to walk"
        raise RecipeError(f"{key} {what}", where=where, todo="give each list as many values, or write override_...")
    if len(lengths - {1}) > 1:
        seen = " and ".join(map(str, sorted(lengths - {1})))
        todo = "give each list as many values, or one value for all"
        raise RecipeError(f"the lists of {key} have different lengths: {seen}", where=where, todo=todo)


def _lengths(data: Any) -> Iterator[int]:
    if isinstance(data, dict):
        for value in data.values():
            yield from _lengths(value)
    elif isinstance(data, list):
        yield len(data)


def _below(tree: Tree, path: Path) -> Tree:
    data = tree.get(*path)
    lines = {known[len(path) :]: line for known, line in tree.lines.items() if known[: len(path)] == path}
    return Tree(tree.file, data if isinstance(data, dict) else {}, lines)


def _merged(base: Tree, over: Tree) -> Tree:
    lines = dict(base.lines)
    data = _merge(base.data, over.data, (), lines, over.lines)
    return Tree(base.file, data, lines)


def _merge(
    base: dict[str, Any], over: dict[str, Any], path: Path, lines: dict[Path, int], theirs: Mapping[Path, int]
) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        here = (*path, key)
        old = result.get(key)
        if value is None:
            result.pop(key, None)
        elif isinstance(old, dict) and isinstance(value, dict):
            result[key] = _merge(old, value, here, lines, theirs)
        else:
            result[key] = value
            lines.update({known: line for known, line in theirs.items() if known[: len(here)] == here})
    return result


def _width(data: Any) -> int:
    if isinstance(data, dict):
        return max((_width(value) for value in data.values()), default=1)
    return len(data) if isinstance(data, list) else 1


def _sliced(data: Any, index: int) -> Any:
    if isinstance(data, dict):
        return {key: _sliced(value, index) for key, value in data.items()}
    if isinstance(data, list):
        return data[0] if len(data) == 1 else data[index] if index < len(data) else None
    return data


def _filled(data: Any, chosen: dict[str, Any]) -> Any:
    if isinstance(data, dict):
        return {key: _filled(value, chosen) for key, value in data.items()}
    if isinstance(data, list):
        return [_filled(value, chosen) for value in data]
    if not isinstance(data, str):
        return data
    for key, value in chosen.items():
        if data == f"{{{key}}}":
            return value
        data = data.replace(f"{{{key}}}", str(value))
    return typed_value(data) if data.isdecimal() else data
