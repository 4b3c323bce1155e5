"""`--random-order` and `--alone` of scripts/test: what they do to the tests of a small project."""

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
SHARES = """
import pytest

@pytest.fixture(scope="module")
def shared():
    return []

@pytest.mark.parametrize("number", range(6))
def test_shares(shared, number):
    pass
"""
FREE = """
import pytest

@pytest.mark.parametrize("number", range(20))
def test_free(number):
    pass
"""


def run(folder: Path, *arguments: str) -> str:
    """What pytest says of the tests in a folder."""
    argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *arguments, str(folder)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_XDIST_WORKER": ""}
    return subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, check=False).stdout


def order(folder: Path, *arguments: str) -> list[str]:
    output = run(folder, "--collect-only", *arguments)
    return [line for line in output.splitlines() if "::" in line]


def test_alone_no_test_sees_what_another_one_left(tmp_path: Path) -> None:
    (tmp_path / "test_leaves.py").write_text(LEAVES)
    output = run(tmp_path, "-p", "tests.alone", "--alone", "-k", "leaves or sees or fails")
    assert "2 passed" not in run(tmp_path, "-k", "test_leaves or sees")
    assert "1 failed, 2 passed" in output
    assert "nothing is there" in output


def test_alone_a_test_that_ends_its_process_is_an_error_and_the_next_one_runs(tmp_path: Path) -> None:
    (tmp_path / "test_leaves.py").write_text(LEAVES)
    (tmp_path / "test_then.py").write_text(FREE)
    output = run(tmp_path, "-p", "tests.alone", "--alone", "-k", "ends or free")
    assert "20 passed" in output
    assert "1 error" in output
    assert "the process of the test ended with 3" in output


def test_a_seed_is_an_order_and_tests_that_share_a_fixture_stay_together(tmp_path: Path) -> None:
    (tmp_path / "test_free.py").write_text(FREE)
    (tmp_path / "test_shares.py").write_text(SHARES)
    with_seed = {seed: order(tmp_path, "-p", "tests.random_order", "--random-order", seed) for seed in ("1", "2")}
    written = order(tmp_path)
    assert len(written) == 26
    assert sorted(with_seed["1"]) == sorted(with_seed["2"]) == sorted(written)
    assert with_seed["1"] == order(tmp_path, "-p", "tests.random_order", "--random-order", "1")
    assert len({tuple(tests_in_order) for tests_in_order in (written, *with_seed.values())}) == 3
    for tests_in_order in with_seed.values():
        together = [number for number, name in enumerate(tests_in_order) if "test_shares" in name]
        assert together == list(range(together[0], together[0] + 6))
