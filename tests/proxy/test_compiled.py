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

from pdserve.installed import proxy_build
from tests.tables import each_row

ROOT = Path(__file__).resolve().parents[2]
HOOKS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]
PATTERNS: list[str] = HOOKS["custom"]["modules"]
MODULES = [str(path.relative_to(ROOT)) for pattern in PATTERNS for path in sorted(ROOT.glob(pattern))]
EXPECTED = "compiled" if os.environ.get("PDSERVE_TEST_COMPILED") else "interpreted"


@each_row("pattern", PATTERNS)
def test_every_line_of_the_list_is_a_module(pattern: str) -> None:
    assert list(ROOT.glob(pattern))


@pytest.mark.wheel
def test_all_that_is_to_be_compiled_is_what_runs() -> None:
    for path in MODULES:
        file = importlib.import_module(path.removesuffix(".py").replace("/", ".")).__file__
        assert file is not None
        assert file.endswith(".so" if EXPECTED == "compiled" else ".py")
        assert ROOT / path in (Path(file), Path(file).with_name(Path(path).name))
    assert proxy_build() == EXPECTED


@pytest.mark.process
@pytest.mark.wheel
def test_the_version_says_which_one_it_is() -> None:
    argv = [sys.executable, "-m", "pdserve.cli.main", "--version"]
    assert f"proxy {EXPECTED}" in subprocess.run(argv, capture_output=True, text=True, check=True).stdout


@each_row("path", MODULES)
def test_nothing_that_is_compiled_waits_while_it_handles_an_exception(path: str) -> None:
    assert waits_in_handlers((ROOT / path).read_text()) == []


def waits_in_handlers(source: str) -> list[int]:
    """Lines. A coroutine of mypyc that is left while it handles an exception takes that along: whatever runs next has
    it as its own. What `async with` and `async for` wait for at their end may be such a place."""
    lines: list[int] = []

    def look(node: ast.AST, handling: bool) -> None:
        if isinstance(node, ast.comprehension) and node.is_async:
            lines.append(node.target.lineno)
        if isinstance(node, ast.AsyncWith | ast.AsyncFor) or (
            handling and isinstance(node, ast.Await | ast.Yield | ast.YieldFrom)
        ):
            lines.append(node.lineno)
        for field, value in ast.iter_fields(node):
            inside = handling or isinstance(node, ast.ExceptHandler) or field == "finalbody"
            if field == "body" and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                inside = False
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    look(child, inside)

    look(ast.parse(source), False)
    return lines
