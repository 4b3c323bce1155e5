"""Which build of the proxy these tests run on: scripts/test runs them on the source and on a compiled wheel."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pdserve.installed import compiled

ROOT = Path(__file__).resolve().parents[2]
HOOKS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]
PATTERNS: list[str] = HOOKS["custom"]["modules"]
MODULES = [str(path.relative_to(ROOT)) for pattern in PATTERNS for path in sorted(ROOT.glob(pattern))]
EXPECTED = "compiled" if os.environ.get("PDSERVE_TEST_COMPILED") else "interpreted"


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_line_of_the_list_is_a_module(pattern: str) -> None:
    assert list(ROOT.glob(pattern))


def test_all_that_is_to_be_compiled_is_what_runs() -> None:
    for path in MODULES:
        file = importlib.import_module(path.removesuffix(".py").replace("/", ".")).__file__
        assert file is not None
        assert file.endswith(".so" if EXPECTED == "compiled" else ".py")
        assert ROOT / path in (Path(file), Path(file).with_name(Path(path).name))
    assert compiled.how() == EXPECTED


@pytest.mark.process
def test_the_version_says_which_one_it_is() -> None:
    argv = [sys.executable, "-m", "pdserve.cli.main", "--version"]
    assert f"proxy {EXPECTED}" in subprocess.run(argv, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("path", MODULES)
def test_nothing_that_is_compiled_waits(path: str) -> None:
    """A coroutine or generator of mypyc that is left in an `except` block takes the handled exception along."""
    waiting = (ast.AsyncFunctionDef, ast.Await, ast.Yield, ast.YieldFrom)
    assert [node.lineno for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, waiting)] == []
