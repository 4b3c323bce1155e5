"""Secrets may stand in a recipe by name only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pdserve.recipe.load import show
from pdserve.recipe.load.problems import Path, Problem


def literal(data: Any, path: Path = ()) -> Iterator[Problem]:
    """Every literal value under a key that names a secret, every URL with a password, and every `{secret: NAME}` where
    no process looks it up, anywhere in the document.

    Only the key is named in what is reported, never the value.
    """
    if isinstance(data, dict) and "secret" in data and _on_a_command_line(path):
        yield Problem(path, "a secret cannot stand here: it is looked up for env only", _instead(path, _wanted(path)))
        return
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
        yield Problem(
            path,
            "looks like a secret with a literal value: it would be saved and logged",
            _instead(path, _wanted(path)),
        )


_ON_COMMAND_LINES = ("args", "extra_args", "l2", "config")
"""Keys whose values end on a command line, as text or as JSON."""


def _on_a_command_line(path: Path) -> bool:
    return any(part in _ON_COMMAND_LINES for part in path[:-1])


def _wanted(path: Path) -> str:
    """The variable for a secret that stands there."""
    key = str(next(p for p in reversed(path) if isinstance(p, str)))
    return key if len(path) > 1 and path[-2] == "env" else key.upper().replace("-", "_")


def _named_secret(path: Path) -> bool:
    inside = _on_a_command_line(path) or "env" in path[:-1]
    key = next((p for p in reversed(path) if isinstance(p, str)), "")
    return inside and key != "secret" and show.secret_name(key)


def _instead(path: Path, name: str) -> str:
    if len(path) > 1 and path[-2] == "env" and path[0] != "lmcache":
        return f"write {{secret: {name}}} and export {name}; only the name is saved"
    if path and path[0] == "lmcache":
        return "let the L2 adapter read a credentials file: LMCache's environment and flags are readable by others"
    return f"command lines are readable by others: set engine.env.{name}: {{secret: {name}}}"
