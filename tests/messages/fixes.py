"""What a message tells its reader to write, read out of the message and carried out on the wrong input."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, replace
from typing import Any

from pdserve.recipe.load import yaml12
from pdserve.recipe.load.problems import Path
from tests.messages.kit import Case

_WRITE = re.compile(r"write (?:for example )?`([^`]+)`")
_MEANT = re.compile(r"did you mean (\S+)\?$")
_PLACE = re.compile(r": ([A-Za-z_]\w*(?:\.[^:\s]+)*): ")


@dataclass(frozen=True)
class Fix:
    """`path`: of the key that is wrong. `write`: the line; `meant`: the key or value to take instead."""

    path: Path | None
    write: str | None = None
    meant: str | None = None
    renamed: bool = False
    """`meant` is a key."""


def fixes(message: str) -> list[Fix] | None:
    """One for each problem of the message; None if any has none that a program can read."""
    lines = message.splitlines()
    several = [line for line in lines if line.startswith("  | ") and " -> " in line]
    problems = several if re.search(r": \d+ problems$", lines[0]) else [_single(lines)]
    if len(problems) < len([line for line in lines if line.startswith("  | ")]) and problems is several:
        return None
    read = [_fix(problem) for problem in problems]
    return None if None in read else [fix for fix in read if fix is not None]


def _single(lines: list[str]) -> str:
    todo = next((line.partition("what to do:")[2].strip() for line in lines if "what to do:" in line), "")
    return f"{lines[0]} -> {todo}"


def _fix(problem: str) -> Fix | None:
    what, _, todo = problem.rpartition(" -> ")
    place = _PLACE.search(f"{what} ")
    path = None if place is None else _path(place.group(1))
    if (write := _WRITE.search(todo)) is not None:
        return Fix(path, write=write.group(1))
    if (meant := _MEANT.search(todo)) is not None:
        renamed = "unknown key" in what or "not the name of an environment variable" in what
        return Fix(path, meant=meant.group(1), renamed=renamed)
    return None


def _path(dotted: str) -> Path:
    return tuple(int(part) if part.isdecimal() else part for part in dotted.split("."))


def applied(case: Case, message: str) -> Case | None:
    """The case after its reader has done what the message says; None where that takes more than a program."""
    if (todo := fixes(message)) is None:
        return None
    for fix in todo:
        if fix.write is not None and fix.write.startswith("--set "):
            case = _with_option(case, shlex.split(fix.write)[1])
        elif (options := _options(case)) and fix.meant is not None and any(_of(o, fix.path or ()) for o in options):
            case = _renamed_option(case, fix)
        else:
            case = _changed(case, fix)
    return case


def _options(case: Case) -> list[str]:
    return [value for option, value in zip(case.argv, case.argv[1:], strict=False) if option == "--set"]


def _of(option: str, path: Path) -> bool:
    return option.partition("=")[0].startswith(".".join(map(str, path)))


def _with_option(case: Case, option: str) -> Case:
    key = option.partition("=")[0]
    kept = tuple(option if word.partition("=")[0] == key else word for word in case.argv)
    return replace(case, argv=kept if option in kept else (*kept, "--set", option))


def _renamed_option(case: Case, fix: Fix) -> Case:
    old = ".".join(map(str, fix.path or ()))
    target = ".".join(map(str, _target(fix.path or (), fix.meant or "")))
    return replace(case, argv=tuple(target + word[len(old) :] if word.startswith(old) else word for word in case.argv))


def _file(case: Case) -> str:
    return "cluster.yaml" if "cluster.yaml" in case.files else "recipe.yaml"


def _text(case: Case) -> str:
    text = case.files.get(_file(case), case.text) if _file(case) == "cluster.yaml" else case.text
    assert isinstance(text, str)
    return text


def _with_text(case: Case, text: str) -> Case:
    if _file(case) == "cluster.yaml":
        return replace(case, files={**case.files, "cluster.yaml": text})
    return replace(case, text=text)


def _changed(case: Case, fix: Fix) -> Case:
    data = yaml12.parse(_text(case), "f").data
    path = fix.path or ()
    if fix.meant is not None:
        target = _target(path, fix.meant)
        if fix.renamed:
            _set(data, target, _take(data, path))
        else:
            _set(data, path, yaml12.scalar(fix.meant))
    else:
        key, value = _line(fix.write or "")
        _set(data, path if key is None else path[: len(path) - path[::-1].index(key)], value)
    return _with_text(case, yaml12.dump(data))


def _line(text: str) -> tuple[str | None, Any]:
    """`key: value`, or a value alone."""
    data = yaml12.parse(text, "f").data
    if isinstance(data, dict) and not text.startswith("{"):
        ((key, value),) = data.items()
        return key, value
    return None, data


def _target(path: Path, meant: str) -> Path:
    parts = _path(meant)
    return parts if len(parts) > 1 else (*path[:-1], *parts)


def _get(data: Any, path: Path) -> Any:
    for part in path:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return None
    return data


def _take(data: Any, path: Path) -> Any:
    return _get(data, path[:-1]).pop(path[-1])


def _set(data: Any, path: Path, value: Any) -> None:
    for part in path[:-1]:
        data = data.setdefault(part, {}) if isinstance(data, dict) else data[part]
    data[path[-1]] = value
