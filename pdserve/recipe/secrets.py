"""Secrets may stand in a recipe by name only."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Iterator
from typing import Any

from pdserve.recipe.load import show
from pdserve.recipe.load.problems import Line, Path, Problem


def find_literals(data: Any, path: Path = ()) -> Iterator[Problem]:
    """Yield every literal value under a key that names a secret, every URL with a password, and every `{secret: NAME}`
    where no process looks it up, anywhere in the document.

    Only the key is named in what is reported, never the value.
    """
    if isinstance(data, dict) and "secret" in data and _on_a_command_line(path):
        given = data["secret"] if isinstance(data["secret"], str) else _variable_for(path)
        what = "a secret cannot stand here: it is looked up for env only"
        yield Problem(path, what, _instead(path, _variable_for(path), given))
        return
    if isinstance(data, dict):
        for key, value in data.items():
            yield from find_literals(value, (*path, key))
        return
    if isinstance(data, list):
        if (path and path[-1] in _COMMANDS) or (len(path) == 2 and path[0] == "setup"):
            yield from _in_words(data, path)
        for i, value in enumerate(data):
            yield from find_literals(value, (*path, i))
        return
    if len(path) == 2 and path[0] == "setup" and isinstance(data, str):
        with contextlib.suppress(ValueError):  # a quote that is not closed: a rule refuses it
            yield from _in_words(shlex.split(data), path, inside=False)
    if isinstance(data, str) and (mark := show.token(data)) is not None:
        what = f"a key or token ({mark}...) with its value: it would be saved and logged"
        name = _variable_for(path) if _named_secret(path) or _in_env(path) else "NAME"
        yield Problem(path, what, _instead(path, name), write=_reference(path, name))
    elif show.secret_value(data):
        name = _variable_for(path) if _in_env(path) else "NAME"
        what = "a URL with a password: it would be saved and logged"
        yield Problem(path, what, _instead(path, name), write=_reference(path, name))
    elif _named_secret(path) and isinstance(data, str | int) and not isinstance(data, bool):
        yield Problem(
            path,
            "looks like a secret with a literal value: it would be saved and logged",
            _instead(path, _variable_for(path)),
            write=_reference(path, _variable_for(path)),
        )
    elif isinstance(data, str) and data.lstrip().startswith(("{", "[")) and _on_a_command_line(path):
        yield from _in_json(data, path)


_COMMANDS = ("command", "options")
"""Keys of lists of words."""
_ASSIGNMENT = re.compile(r"""(?:^([A-Za-z_]\w*)|[\s;&|("']([A-Z]\w*))=["']?([^\s"']+)""")
"""NAME=value as `env` and a shell take it: a word, or a part of a script. `key=` is also Python's."""


def _in_words(words: list[Any], path: Path, *, inside: bool = True) -> Iterator[Problem]:
    """Find secrets in words: `--token=VALUE`, `--token VALUE` and `TOKEN=VALUE`. `inside`: the words are items of a
    list at `path`. A value that a shell looks up ($TOKEN) is none."""
    for i, word in enumerate(words):
        if not isinstance(word, str):
            continue
        if not word.startswith("--"):
            if path[0] != "container":  # a rule reads its options
                yield from _assignment_problems(word, (*path, i) if inside else path)
            continue
        flag, equals, value = word.partition("=")
        following = words[i + 1] if i + 1 < len(words) else ""
        given = value if equals else following if isinstance(following, str) and following[:1] != "-" else ""
        if given and not given.startswith("$") and show.secret_name(flag) and show.token(given) is None:
            name = flag.removeprefix("--").upper().replace("-", "_")
            yield Problem(
                (*path, i) if inside else path,
                f"{flag} looks like a secret with a literal value: it would be saved and logged",
                _instead(path, name),
            )


def _assignment_problems(word: str, path: Path) -> Iterator[Problem]:
    for word_name, script_name, value in _ASSIGNMENT.findall(word):
        name = word_name or script_name
        if show.secret_name(name) and not value.startswith(("$", "`")) and show.token(value) is None:
            what = f"{name} looks like a secret with a literal value: it would be saved and logged"
            yield Problem(path, what, _instead(path, name))


def _in_json(text: str, path: Path) -> Iterator[Problem]:
    """Find secrets in a text that may be JSON. A text that is JSON reaches the command line like a mapping that is
    written out."""
    pairs: list[tuple[str, Any]] = []

    def kept(some: list[tuple[str, Any]]) -> None:
        pairs.extend(some)  # all of a key that is there twice

    try:
        json.loads(text, object_pairs_hook=kept)
    except (ValueError, RecursionError):
        return  # it is not JSON
    for key, value in pairs:
        values = value if isinstance(value, list) else [value]
        if show.secret_name(key) and any(isinstance(v, str | int) and not isinstance(v, bool) for v in values):
            what = f"{show.value(key)} in it looks like a secret with a literal value: it would be saved and logged"
            yield Problem(path, what, _instead(path, _variable_for((key,))))


_ON_COMMAND_LINES = ("args", "extra_args", "l2", "config")
"""Keys whose values end on a command line, as text or as JSON."""


def _on_a_command_line(path: Path) -> bool:
    return any(part in _ON_COMMAND_LINES for part in path[:-1])


def _variable_for(path: Path) -> str:
    """Return the variable for a secret that stands there."""
    key = str(next(p for p in reversed(path) if isinstance(p, str)))
    return key if len(path) > 1 and path[-2] == "env" else key.upper().replace("-", "_")


def _named_secret(path: Path) -> bool:
    inside = _on_a_command_line(path) or "env" in path[:-1]
    key = next((p for p in reversed(path) if isinstance(p, str)), "")
    return inside and key != "secret" and show.secret_name(key)


def _in_env(path: Path) -> bool:
    """Return whether a secret may stand there by its name."""
    return len(path) > 1 and path[-2] == "env" and path[0] != "lmcache"


def _reference(path: Path, name: str) -> Line | None:
    return Line(path, f"{{secret: {name}}}") if _in_env(path) else None


def _instead(path: Path, name: str, source: str | None = None) -> str:
    if _in_env(path):
        return f"export {name}, of which only the name is saved"
    if path and path[0] == "lmcache":
        return "let the L2 adapter read a credentials file: LMCache's environment and flags are readable by others"
    return f"command lines are readable by others: set engine.env.{name}: {{secret: {source or name}}}"
