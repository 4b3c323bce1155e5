"""A command of pdserve that runs in this process, in a folder of its own."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from unittest import mock

from pdserve.cli import main


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
