"""What `pdserve doctor` looks for in logs is what the sources of the releases log."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.doctor.symptom_lines import LINES, SymptomLine
from tests.upstream.sources import source_tree

pytestmark = pytest.mark.upstream
RELEASES = {"vllm": "0.32.0", "lmcache": "0.5.6"}


@pytest.mark.parametrize("sample", LINES, ids=lambda sample: f"{sample.rule}-{sample.process}")
def test_the_line_is_in_the_source_that_it_names(sample: SymptomLine) -> None:
    package = sample.source.partition("/")[0]
    assert any(sample.call in text for text in texts(source_tree(package, RELEASES[package]) / sample.source))


@cache
def texts(file: Path) -> tuple[str, ...]:
    return tuple(_texts(ast.parse(file.read_text())))


def _texts(tree: ast.AST) -> Iterator[str]:
    """Every text of a module, pieces that stand beside each other as one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
