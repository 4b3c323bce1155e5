"""What `pdserve doctor` looks for in logs is what the installed releases log."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.doctor.symptom_lines import LINES
from tests.upstream.sources import installed_tree

pytestmark = pytest.mark.upstream


def test_every_line_is_in_the_source_that_it_names() -> None:
    wrong = [
        (sample.rule, sample.process, sample.source)
        for sample in LINES
        if not any(
            sample.call in text for text in texts(installed_tree(sample.source.partition("/")[0]) / sample.source)
        )
    ]
    assert wrong == []


@cache
def texts(file: Path) -> list[str]:
    """Every text of a module, pieces that stand beside each other as one."""
    nodes = ast.walk(ast.parse(file.read_text()))
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
