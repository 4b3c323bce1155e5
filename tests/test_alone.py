"""Runs the tests of a small project by `-p tests.alone --alone`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.launch.deployment import REPOSITORY, execute

pytestmark = pytest.mark.process

LEAVES = """
import os

left = []

def test_leaves():
    left.append(1)

def test_sees_nothing():
    assert not left

def test_fails():
    assert left, "nothing is there"

def test_ends_its_process():
    os._exit(3)
"""


def run(folder: Path, *arguments: str) -> str:
    """What pytest says of the tests in a folder."""
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        "-q",
        *arguments,
        str(folder),
    ]
    return execute(*argv, cwd=folder, env={"PYTHONPATH": str(REPOSITORY), "PYTEST_XDIST_WORKER": ""}).stdout


def test_no_test_sees_what_another_left_and_one_that_ends_its_process_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "test_leaves.py").write_text(LEAVES)
    output = run(tmp_path, "-p", "tests.alone", "--alone")
    assert "2 passed" not in run(tmp_path, "-k", "test_leaves or sees")
    assert "1 failed, 2 passed, 1 error" in output
    assert "nothing is there" in output
    assert "the process of the test ended with 3" in output
