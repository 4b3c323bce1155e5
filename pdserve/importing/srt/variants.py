"""The variants of a file of srt-slurm: `base` with `override_*` and `zip_override_*`, and `sweep` with {placeholders}.

Its rules (docs/overrides.md and docs/sweeps.md there): mappings are merged key by key, null removes a key, lists and
values replace; the lists of a zip_override are walked side by side, a list of one is for all, a list of lists holds
literal ones; a sweep is every combination.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from pdserve.importing.flags import typed
from pdserve.importing.yaml_tree import Tree
from pdserve.recipe.load.problems import Path

_OVERRIDE, _ZIP = "override_", "zip_override_"


def variants(tree: Tree) -> dict[str, Tree]:
    """Every variant by its name; one without a name where the file has one recipe only."""
    named = dict(_overridden(tree)) if tree.has("base") else {"": tree}
    return {name: variant for base, whole in named.items() for name, variant in _swept(base, whole)}


def _overridden(tree: Tree) -> Iterator[tuple[str, Tree]]:
    base = _below(tree, ("base",))
    yield "base", base
    for key in tree.data:
        if key.startswith(_OVERRIDE):
            yield key, _merged(base, _below(tree, (key,)))
        elif key.startswith(_ZIP):
            over = _below(tree, (key,))
            for index in range(_width(over.data)):
                yield f"{key}[{index}]", _merged(base, Tree(tree.file, _sliced(over.data, index), over.lines))


def _swept(name: str, tree: Tree) -> Iterator[tuple[str, Tree]]:
    sweep = tree.get("sweep")
    if not isinstance(sweep, dict) or not sweep:
        yield name, tree
        return
    values = [value if isinstance(value, list) else [value] for value in sweep.values()]
    for combination in itertools.product(*values):
        chosen = dict(zip(sweep, combination, strict=True))
        label = ",".join(f"{key}={value}" for key, value in chosen.items())
        data = {key: _filled(value, chosen) for key, value in tree.data.items() if key != "sweep"}
        yield f"{name}:{label}" if name else label, Tree(tree.file, data, tree.lines)


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
    return typed(data) if data.isdecimal() else data
