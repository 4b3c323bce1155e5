"""A test is judged by its own shared memory, whatever other programs of the machine do with theirs."""

from __future__ import annotations

import ctypes
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.system import procfs
from tests.launch.deployment import REPOSITORY, execute

pytestmark = pytest.mark.process

_PR_CAPBSET_DROP, _CAP_SYS_ADMIN = 24, 21

STRANGER = """
import ctypes, pathlib, select, sys
token, count = sys.argv[1], pathlib.Path(sys.argv[2])
number, ids = 0, []
try:
    while number < 20000:
        pathlib.Path(f"/dev/shm/psm_{token}{number}").write_bytes(b"x")
        if number < 100:
            ids.append(ctypes.CDLL(None).shmget(0, 4096, 0o1600))
        number += 1
        count.write_text(f"{number}.")
        if select.select([0], [], [], 0.01)[0]:
            break
finally:
    for segment in ids:
        ctypes.CDLL(None).shmctl(segment, 0, None)
"""
"""Makes segments all the time, and leaves them in /dev/shm. Each is counted once it is there."""

TESTS = """
import os, pathlib, time

def count():
    try:
        return float(pathlib.Path({count!r}).read_text())
    except ValueError:  # it is being written
        return 0

def test_meanwhile_a_stranger_leaves_segments():
    before = 0
    while not before:
        before = count()
    while count() < before + 3:
        time.sleep(0.001)

def test_leaves_a_segment():
    pathlib.Path(f"/dev/shm/pdserve-test-{{os.getpid()}}-left").touch()

def test_takes_it_away():
    pathlib.Path(f"/dev/shm/pdserve-test-{{os.getpid()}}-left").unlink()
"""


@pytest.fixture
def stranger(tmp_path: Path) -> Iterator[Path]:
    """The file with the number of the segments that it has made."""
    token, count = secrets.token_hex(4), tmp_path / "count"
    count.write_text("0")
    process = subprocess.Popen([sys.executable, "-c", STRANGER, token, str(count)], stdin=subprocess.PIPE)
    try:
        yield count
    finally:
        process.communicate()
        for path in procfs.SHM.glob(f"psm_{token}*"):
            path.unlink()


def without_namespaces() -> None:
    """As root of a plain container: no right to namespaces. Users have none anyway."""
    if os.geteuid() == 0:
        ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, _CAP_SYS_ADMIN, 0, 0, 0)


def test_only_its_own_segment_fails_a_test(stranger: Path, tmp_path: Path) -> None:
    """Where the kernel separates them, all tests of this process show it."""
    tests = tmp_path / "test_inside.py"
    tests.write_text(TESTS.format(count=str(stranger)))
    options = ("-p", "tests.conftest", "-p", "no:cacheprovider", "-p", "no:randomly", "-q")
    argv = [sys.executable, "-m", "pytest", *options, str(tests)]
    done = execute(*argv, env={"PYTHONPATH": str(REPOSITORY)}, preexec_fn=without_namespaces)
    assert "3 passed, 1 error" in done.stdout, done.stdout + done.stderr
    assert "test_leaves_a_segment" in done.stdout.split("short test summary info")[1]
