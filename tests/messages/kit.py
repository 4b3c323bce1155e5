"""One wrong input, and what pdserve says about it: the command runs in this process, in a folder of its own."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from unittest import mock

from pdserve.cli import main

GOOD = """\
schema: 1
name: good
platform: cuda
devices_per_node: 8
model:
  id: org/model
  revision: "0123456789abcdef0123456789abcdef01234567"
  served_name: model
prefill:
  parallel: {tp: 4}
decode:
  parallel: {tp: 4}
lmcache:
  l1_size_gb: 100
"""
HOSTS = "schema: 1\nhosts:\n  - name: gpu1\n  - name: gpu2\n"
EXTENDED = "extends: good.yaml\n"
VALIDATE = ("validate", "recipe.yaml")


@dataclass(frozen=True)
class Case:
    """`text`: of recipe.yaml, which builds on good.yaml. `argv`: the command."""

    title: str
    text: str | bytes = EXTENDED
    argv: tuple[str, ...] = VALIDATE
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    fact: str = ""
    """By which the message is known, where no program can read the fix out of it."""


def over(title: str, text: str, *, fact: str = "", **environ: str) -> Case:
    """A recipe that adds `text` to good.yaml."""
    return Case(title, EXTENDED + text, environ=environ, fact=fact)


def whole(title: str, text: str | bytes, *, fact: str = "") -> Case:
    """A recipe that builds on nothing."""
    return Case(title, text, fact=fact)


def option(title: str, *options: str, text: str = EXTENDED, fact: str = "") -> Case:
    """Options of `validate`."""
    return Case(title, text, (*VALIDATE, *options), fact=fact)


def cluster(title: str, text: str, *, fact: str = "") -> Case:
    """A cluster file."""
    argv = ("up", "good.yaml", "--cluster", "cluster.yaml", "--dry-run")
    return Case(title, argv=argv, files={"cluster.yaml": text}, fact=fact)


@dataclass(frozen=True)
class Outcome:
    """What a command ended with and wrote."""

    code: int | str | None
    out: str
    err: str


@contextlib.contextmanager
def _as_program() -> Iterator[None]:
    """Else usage lines name pytest. What is imported meanwhile stays: a class imported twice is two classes."""
    before = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = before


def run(argv: tuple[str, ...], folder: Path, environ: Mapping[str, str]) -> Outcome:
    """Runs `pdserve ARGV` in `folder`, without any variable but `environ`, no program on PATH and a home there."""
    out, err = io.StringIO(), io.StringIO()
    variables = {"PATH": str(folder / "bin"), "HOME": str(folder), "PDSERVE_HOME": str(folder / "home")}
    variables |= {"COLUMNS": "120", **environ}
    with (
        contextlib.chdir(folder),
        mock.patch.dict(os.environ, variables, clear=True),
        mock.patch.object(sys, "argv", ["pdserve", *argv]),
        _as_program(),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = main._run()
    return Outcome(code, out.getvalue(), err.getvalue())


def write(case: Case, folder: Path) -> None:
    """The case's files, beside good ones."""
    there = {"good.yaml": GOOD, "hosts.yaml": HOSTS, "recipe.yaml": case.text, **case.files}
    for name, text in there.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
