"""Numbers that the kernel hands down: no session, double fork or cleared environment loses one, and none is copied."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pdserve.system import lineage
from tests.fakes.engine_process import DAEMON
from tests.launch.test_survival import until

pytestmark = pytest.mark.process

STARTS = f"""
import os, subprocess, sys
from pdserve.system import lineage
inner = int(sys.argv[1])
numbers = [lineage.begin() for _ in range(1 + inner)]
with lineage.born_here() as birth:
    subprocess.run([sys.executable, "-c", {DAEMON!r}], env={{}}, check=True)
after = lineage.numbers(os.getpid())
# In a single write: the daemon writes to the same pipe at the same time, and with PYTHONUNBUFFERED print() makes many.
os.write(1, (" ".join(map(str, [os.getpid(), *numbers, birth, after.birth, after.line])) + "\\n").encode())
input()
"""


@contextmanager
def starter(inner: int) -> Iterator[tuple[int, list[int]]]:
    """PID of its daemon, and what it prints: its PID, its lines, the daemon's birth and its own numbers after it."""
    argv = [sys.executable, "-c", STARTS, str(inner)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        # The daemon is the first to write, or the last.
        numbers, named = sorted(process.stdout.readline() for _ in range(2))
        daemon = int(named.split()[1])
        try:
            yield daemon, [int(word) for word in numbers.split()]
        finally:
            os.kill(daemon, signal.SIGKILL)
            process.communicate("\n")
            os.waitpid(daemon, 0)  # orphans become children of this process (tests/conftest.py)


def test_a_daemon_that_left_everything_has_both_numbers() -> None:
    with starter(inner=0) as (daemon, (pid, line, birth, own_birth, own_line)):
        assert lineage.numbers(daemon) == (birth, line)
        until(lambda: lineage.descendants(line) == {pid, daemon})
        assert (own_birth, own_line) == (line, line), "its own are as before the birth"
        assert birth < line


def test_a_run_inside_of_another_one_has_a_number_of_its_own() -> None:
    with starter(inner=1) as (daemon, (pid, outer, inner, birth, *_)):
        assert outer > inner > birth
        assert lineage.descendants(outer) == set()
        until(lambda: lineage.descendants(inner) == {pid, daemon})


def test_two_births_are_told_apart() -> None:
    with lineage.born_here() as first, lineage.born_here() as second:
        assert first != second


LOW = """
import os, resource
from pdserve.system import lineage
resource.setrlimit(15, (1_000_000, 2_000_000))
with lineage.born_here() as birth:
    print(lineage.begin(), birth, lineage.numbers(os.getpid()), resource.getrlimit(15))
"""


def test_a_limit_that_is_low_stays_as_it_is() -> None:
    done = subprocess.run([sys.executable, "-c", LOW], capture_output=True, text=True, check=True)
    assert done.stdout == "None None InheritedNumbers(birth=0, line=0) (1000000, 2000000)\n"


def test_of_a_process_that_is_gone_there_are_none() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert lineage.numbers(process.pid) == (0, 0)


def test_who_has_no_number_of_a_run_is_no_descendant_of_it() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            assert lineage.numbers(process.pid).line == lineage.numbers(os.getpid()).line
            assert process.pid not in lineage.descendants(1 << 62 | 1)
        finally:
            process.kill()
