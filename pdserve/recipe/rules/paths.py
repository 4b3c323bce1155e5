"""Paths that would not be found: `~`, which no shell expands here, and a folder in the place of a model id."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pdserve.recipe.load.extends import PATHS
from pdserve.recipe.load.problems import Path, Problem
from pdserve.recipe.model import Recipe
from pdserve.roles import ENGINE_ROLES

_OURS: tuple[Path, ...] = (
    *PATHS,
    ("engine", "python"),
    *((section, "command", 0) for section in ("engine", "lmcache", "proxy")),
)
_LOCAL = re.compile(r"\.{0,2}/|~|\.{1,2}$")


def tilde(recipe: Recipe) -> Iterator[Problem]:
    """A path of the recipe itself that begins with `~`, or was so in the file that it extends."""
    document = recipe.model_dump(by_alias=True)
    for path in _OURS:
        value = _at(document, path)
        if isinstance(value, str) and "~" in value.split("/"):
            yield Problem(path, "~ is not expanded: it would be a folder of that name", f"write {_with_home(value)}")


def tilde_passed_on(recipe: Recipe) -> Iterator[Problem]:
    """In flags and variables it is passed on; some programs expand it, and in a container the home is another one."""
    for section in ("engine", *ENGINE_ROLES):
        for key in ("args", "env"):
            for name, value in getattr(getattr(recipe, section), key, {}).items():
                if isinstance(value, str) and value.startswith("~/"):
                    yield Problem(
                        (section, key, name),
                        "~ is passed on as it is, and not every program expands it",
                        f"write {_with_home(value)}",
                    )


def model_id(recipe: Recipe) -> Iterator[Problem]:
    """A folder as an id would be neither looked for on the nodes nor made absolute."""
    name = recipe.model.id
    if name is not None and _LOCAL.match(name):
        yield Problem(
            ("model", "id"),
            "this is a path, and an id names a model of the hub",
            f"write path: {_with_home(name) if name.startswith('~') else name} in the place of id",
        )


def _with_home(path: str) -> str:
    return "${HOME}/" + path.split("~/", 1)[-1] if "~/" in path else "${HOME}"


def _at(value: Any, path: Path) -> Any:
    for part in path:
        if isinstance(value, dict):
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            return None
    return value
