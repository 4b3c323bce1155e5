"""A child and its whole family: seen dying at once, stopped to the last member, never confused with a stranger."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.system import procfs
from pdserve.system.process import (
    Child,
    bring_back,
    output_of,
    pass_on,
    send,
    share_of_cpus,
    spawn,
)
from pdserve.system.procfs import ProcessId
from tests.supervision.agents import until
from tests.tables import each_row

pytestmark = pytest.mark.process

READY = "import time; print('up', flush=True); time.sleep(600)"
IGNORES_TERM = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)
ORPHANER = """
import os, signal, sys, time
if os.fork() == 0:
    {leave_session}
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(sys.argv[1], "w").write(str(os.getpid()))
    time.sleep(600)
time.sleep(600)
"""


BOUND_APART = """
import os, signal, sys, threading
first, last = map(int, sys.argv[2:])
def other():
    os.sched_setaffinity(0, {first})
    os.sched_setaffinity(os.getpid(), {last})
    open(sys.argv[1], "w").write("up")
    signal.pause()
threading.Thread(target=other, daemon=True).start()
signal.pause()
"""
"""The thread that was first on one CPU, another one on another."""


def start(tmp_path: Path, code: str, *args: str, control_stdin: bool = False, cpus: set[int] | None = None) -> Child:
    argv, log = [sys.executable, "-c", code, *args], tmp_path / "child.log"
    return spawn(argv, env={}, log=log, marker="test/child", control_stdin=control_stdin, cpus=cpus)


async def test_a_child_keeps_to_its_cpus(tmp_path: Path) -> None:
    [first, *_] = sorted(os.sched_getaffinity(0))
    child = start(tmp_path, READY, cpus={first})
    await until(lambda: os.sched_getaffinity(child.pid) == {first})
    await child.stop(0)


async def test_threads_that_have_bound_themselves_to_other_cpus_are_brought_back(tmp_path: Path) -> None:
    first, *_, last = sorted([*os.sched_getaffinity(0)] * 2)
    child = start(tmp_path, BOUND_APART, str(tmp_path / "up"), str(first), str(last))

    def bound() -> list[set[int]]:
        return [os.sched_getaffinity(thread) for thread in procfs.threads([child.pid])]

    await until_file(tmp_path / "up")
    try:
        bring_back({child.pid}, {first, last})
        assert sorted(map(list, bound())) == [[first], [last]], "both have chosen among these"
        bring_back({child.pid, 2**22}, {first})
        assert bound() == [{first}, {first}]
    finally:
        await child.stop(0)


@each_row("share, cpus", [
    (None, {2, 3, 5, 7, 8}),
    ((0, 1), {2, 3, 5, 7, 8}),
    ((0, 2), {2, 3}),
    ((1, 2), {5, 7, 8}),
    ((4, 5), {8}),
    ((1, 6), {3}),
    ((5, 6), {2}),
])  # fmt: skip
def test_equal_parts_of_the_cpus_and_never_none(share: tuple[int, int] | None, cpus: set[int]) -> None:
    assert share_of_cpus([8, 7, 5, 3, 2], share) == cpus


async def until_file(path: Path) -> str:
    await until(lambda: path.exists() and path.read_text() != "")
    return path.read_text()


async def test_a_signal_is_named_and_never_reaches_a_later_process_with_the_pid(tmp_path: Path) -> None:
    child = start(tmp_path, READY)
    stranger = ProcessId(pid=child.pid, start_ticks=child.identity.start_ticks - 1)
    assert send(stranger, signal.SIGKILL) is False
    assert child.poll() is None
    send(child.identity, signal.SIGKILL)
    assert str(await child.wait()) == "killed by SIGKILL"
    assert await child.stop(grace=1) is False
    assert await child.stop(grace=1) is False, "of what is gone too"


POLITE = (
    "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); "
    "print('up', flush=True); time.sleep(600)"
)


@pytest.mark.parametrize(
    ("code", "held", "grace", "forced"),
    [(POLITE, False, 30, False), (READY, True, 30, False), (IGNORES_TERM, False, 0.2, True)],
    ids=["asked first", "one that stands still", "killed if it ignores that"],
)
async def test_stop(tmp_path: Path, code: str, held: bool, grace: float, forced: bool) -> None:
    child = start(tmp_path, code)
    await until_file(tmp_path / "child.log")
    if held:
        send(child.identity, signal.SIGSTOP)
    assert await child.stop(grace=grace) is forced
    assert code != POLITE or str(await child.wait()) == "exited with code 0"


@pytest.mark.parametrize("leave_session", ["", "os.setsid()"], ids=["same session", "own session"])
async def test_a_member_that_outlives_its_killed_parent_is_stopped(tmp_path: Path, leave_session: str) -> None:
    """What vLLM's EngineCore does when its API server is SIGKILLed: it goes on, with the memory held."""
    pid_file = tmp_path / "pid"

    child = start(tmp_path, ORPHANER.format(leave_session=leave_session), str(pid_file))
    orphan = int(await until_file(pid_file))
    send(child.identity, signal.SIGKILL)
    await child.wait()
    assert orphan in child.family(), "an orphan is still family"
    await child.stop(grace=0.2)
    identity = procfs.identify(orphan)
    assert identity is None or not identity.alive()


async def test_a_later_session_with_the_number_of_a_child_that_has_ended_is_a_strangers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = start(tmp_path, "pass")
    await child.wait()
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as stranger:
        monkeypatch.setattr(Child, "pid", stranger.pid)
        try:
            assert (child.family(), await child.stop(grace=5), stranger.poll()) == (set(), False, None)
        finally:
            stranger.kill()


def test_a_signal_is_passed_on_to_a_child_until_it_was_waited_for() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        pass_on(child.pid, (signal.SIGUSR1,))
        signal.raise_signal(signal.SIGUSR1)
        assert child.wait() == -signal.SIGUSR1
        signal.raise_signal(signal.SIGUSR1)  # its number may be a stranger's now
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_tool_whose_output_has_no_end_is_ended_and_takes_no_memory() -> None:
    result = output_of(["sh", "-c", "exec yes"], timeout=600)
    assert result == (None, "", "more than 64 MiB of output")


def test_a_tool_gets_its_input_and_its_outputs_are_kept_apart() -> None:
    """More than a pipe holds goes both ways at once; and what a tool says need not be UTF-8."""
    code = "import sys; data = sys.stdin.read(); print(data, end=''); sys.stderr.buffer.write(b'gr\\xfcn'); sys.exit(3)"
    text = "x" * (1 << 20)
    assert output_of([sys.executable, "-c", code], timeout=120, stdin=text) == (3, text, "gr\ufffdn")
    assert output_of(["true"], timeout=120, stdin=text) == (0, "", ""), "who does not read is waited for"
    assert output_of(["sleep", "600"], timeout=0.1) == (None, "", "no answer within 0 s")
