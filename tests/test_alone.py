"""Runs the tests of a small project by `-p tests.alone --alone`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[1]
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
FREE = """
import pytest

@pytest.mark.parametrize("number", range(20))
def test_free(number):
    pass
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
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_XDIST_WORKER": ""}
    return subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, check=False).stdout


def test_no_test_sees_what_another_left(tmp_path: Path) -> None:
    (tmp_path / "test_leaves.py").write_text(LEAVES)
    output = run(tmp_path, "-p", "tests.alone", "--alone", "-k", "leaves or sees or fails")
    assert "2 passed" not in run(tmp_path, "-k", "test_leaves or sees")
    assert "1 failed, 2 passed" in output
    assert "nothing is there" in output


def test_one_that_ends_its_process_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "test_leaves.py").write_text(LEAVES)
    (tmp_path / "test_then.py").write_text(FREE)
    output = run(tmp_path, "-p", "tests.alone", "--alone", "-k", "ends or free")
    assert "20 passed" in output
    assert "1 error" in output
    assert "the process of the test ended with 3" in output
