"""A recipe is compared with the launch that it was made of, value by value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pdserve.recipe import effective
from pdserve.recipe.load.problems import Path
from pdserve.recipe.model import Recipe

_SECTIONS = (
    "platform",
    "devices_per_node",
    "image",
    "mode",
    "model",
    "setup",
    "lmcache",
    "mooncake_store",
    "container",
    "slurm",
    "exclude_nodes",
)
"""What launches of other tools describe; the proxy, ports and most timeouts are pdserve's own."""
_ROLE = ("instances", "parallel", "devices", "kv_load_failure_policy", "load_timeout_seconds")


@dataclass(frozen=True)
class Departure:
    """Describes a value that differs. None: there is none."""

    path: Path
    recipe: Any
    source: Any


def departures(recipe: Recipe, source: Recipe) -> list[Departure]:
    """Return every difference of what the two start, in the order of the source. Defaults, and what is shared by all
    roles, are applied first: where a value is written makes no difference."""
    ours, theirs = dict(_facts(recipe)), dict(_facts(source))
    return [
        Departure(path, ours.get(path), theirs.get(path))
        for path in dict.fromkeys([*theirs, *ours])
        if ours.get(path) != theirs.get(path)
    ]


def _facts(recipe: Recipe) -> Iterator[tuple[Path, Any]]:
    data = recipe.model_dump(by_alias=True)
    for section in _SECTIONS:
        yield from _leaves((section,), data[section])
    yield ("engine", "hash_seed"), recipe.engine.hash_seed
    yield ("engine", "command"), recipe.engine.command
    yield ("timeouts", "engine_seconds"), recipe.timeouts.engine_seconds
    for name, role, connector in effective.roles(recipe):
        dumped = role.model_dump(by_alias=True)
        for key in _ROLE:
            yield from _leaves((name, key), dumped[key])
        shown = None if connector is None else connector.model_dump(by_alias=True)
        yield from _leaves((name, "connector"), shown)
        for flag, value in effective.args_of(recipe, role).items():
            yield (name, "args", flag), value
        for variable, text in effective.env_of(recipe, role).items():
            yield (name, "env", variable), text if isinstance(text, str | int) else text.model_dump()


def _leaves(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    """Yield the values of a document with their paths. Mappings are walked; a list is one value."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves((*path, key), item)
    elif value not in (None, {}, []):
        yield path, value
