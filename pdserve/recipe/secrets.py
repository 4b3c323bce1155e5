"""Secrets may stand in a recipe by name only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pdserve.recipe import show
from pdserve.recipe.problems import Path, Problem


def literal(data: Any, path: Path = ()) -> Iterator[Problem]:
    """Every literal value under a key that names a secret, and every URL with a password, anywhere in the document.

    Only the key is named in what is reported, never the value.
    """
    if isinstance(data, dict):
        for key, value in data.items():
            yield from literal(value, (*path, key))
        return
    if isinstance(data, list):
        for i, value in enumerate(data):
            yield from literal(value, (*path, i))
        return
    if show.secret_value(data):
        yield Problem(path, "a URL with a password: it would be saved and logged", _instead(path, "NAME"))
    elif _named_secret(path) and isinstance(data, str | int) and not isinstance(data, bool):
        key = str(next(p for p in reversed(path) if isinstance(p, str)))
        name = key if len(path) > 1 and path[-2] == "env" else key.upper().replace("-", "_")
        yield Problem(
            path, "looks like a secret with a literal value: it would be saved and logged", _instead(path, name)
        )


def _named_secret(path: Path) -> bool:
    free = ("args", "env", "extra_args", "l2", "config")
    inside = any(part in free for part in path[:-1])
    key = next((p for p in reversed(path) if isinstance(p, str)), "")
    return inside and key != "secret" and show.secret_name(key)


def _instead(path: Path, name: str) -> str:
    if len(path) > 1 and path[-2] == "env" and path[0] != "lmcache":
        return f"write {{secret: {name}}} and export {name}; only the name is saved"
    if path and path[0] == "lmcache":
        return "let the L2 adapter read a credentials file: LMCache's environment and flags are readable by others"
    return f"command lines are readable by others: set engine.env.{name}: {{secret: {name}}}"
