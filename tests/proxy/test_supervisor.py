"""The parent of the proxy's processes by itself: signals, processes that end, hang or do not start, a program that is
replaced. Each test runs it as a program of its own, with members that the test makes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.nursery import REPOSITORY

pytestmark = pytest.mark.process


SCRIPTS = """
import ctypes, itertools, os, signal, sys, time
from pdserve.pd.processes import handover, heartbeat, pauses, supervisor
from pdserve.pd.processes.child import Configured
from pdserve.pd.processes.handover import Heir, Inheritance
from pdserve.pd.processes.heartbeat import Beats
"""


def ran(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", SCRIPTS + script, *arguments]
    return subprocess.run(argv, check=False, timeout=90, cwd=REPOSITORY, capture_output=True, text=True)


SIGNALLED = """

moment, parent, real, calls = sys.argv[1], os.getpid(), getattr(os, sys.argv[1]), []

def signalled(*args):
    if moment == "pipe" and os.getpid() == parent:
        calls.append(1)
        if len(calls) == 4:  # one for itself, two for the first member
            os.kill(parent, signal.SIGTERM)
    answer = real(*args)
    if moment == "fork" and answer and not calls or moment == "waitpid" and answer[0] and not calls:
        calls.append(1)
        os.kill(parent, signal.SIGTERM)
    return answer

def member(index, lines, asks):
    if moment == "waitpid" and index == 1:
        os.write(asks, b'{"serving": true}\\n')
        return 0
    signal.pthread_sigmask(signal.SIG_BLOCK, supervisor.SIGNALS)
    signal.sigwait(supervisor.SIGNALS)
    return 0

setattr(os, moment, signalled)
sys.exit(supervisor.Processes(3, member, None, Configured(b"")).run())
"""

SIGNALLED_LAST = """

wait = os.waitpid

def signalled(pid, options):
    answer = wait(pid, options)
    os.kill(os.getpid(), signal.SIGTERM)
    return answer

os.waitpid = signalled
over = supervisor.Processes(0, None, None, Configured(b""))
over._checking = os.posix_spawn(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)"], os.environ)
sys.exit(over.run())
"""


JUDGED = """

how, parent, forks, fork, clock = sys.argv[1], os.getpid(), [], os.fork, itertools.count(0, 10)

def counted():
    if len(forks) == 5:
        os._exit(99)  # it would go on like this
    if how == "hangs":
        heartbeat.STARTING_SECONDS = 600.0 if forks else 0.01
    forks.append(1)
    return fork()

def looked(vigil):
    vigil.looks = getattr(vigil, "looks", 0) + 1
    if vigil.looks == 50:
        os.kill(parent, signal.SIGTERM)
    look(vigil)

def member(index, lines, asks):
    if how == "never serves":
        return 3
    if how == "has served":
        os.write(asks, b'{"serving": true}\\n')
        if len(forks) == 1:
            return 3
        os.kill(parent, signal.SIGTERM)
    if how == "ends again":
        os.write(asks, b'{"serving": true}\\n')
        if len(forks) < 4:
            return 3
        os.kill(parent, signal.SIGTERM)
    if how == "hangs" and len(forks) == 2:
        os.write(asks, b'{"serving": true}\\n')
        os.kill(parent, signal.SIGTERM)
    signal.sigwait(supervisor.SIGNALS)
    return 0

os.fork, beats, pauses._FIRST_SECONDS = counted, None, 0.01
if how == "never serves":
    time.monotonic = lambda: next(clock)  # whatever it does takes ten seconds, as imports on a slow node
if how == "begins":
    look, heartbeat.Vigil.look = heartbeat.Vigil.look, looked
    heartbeat.BEAT_SECONDS, heartbeat.HUNG_SECONDS, beats = 0.001, 0.0, Beats.create(1)
if how == "hangs":
    heartbeat.BEAT_SECONDS, beats = 0.001, Beats.create(1)
code = supervisor.Processes(1, member, None, Configured(b""), beats=beats).run()
print(code, len(forks))
"""

TOLD_TO_END = """

parent, fork, forks, said = os.getpid(), os.fork, [], open(os.dup(1), "w", buffering=1)

def counted():
    forks.append(1)
    return fork()

def member(index, lines, asks):
    if len(forks) == 2:
        return 3  # the first successor does not start
    os.write(asks, b'{"serving": true}\\n')
    if len(forks) == 1:
        os.write(asks, b'{"leaving": true}\\n')
    signum = signal.sigwait(supervisor.SIGNALS)
    said.write(f"{len(forks)} {signal.Signals(signum).name}\\n")
    if len(forks) == 1:
        os.kill(parent, signal.SIGTERM)
    return 0

os.fork = counted
sys.exit(supervisor.Processes(1, member, None, Configured(b"")).run())
"""

GIVEN_UP = """

parent, read, (ends, end) = os.getpid(), supervisor.Processes._read_child, os.pipe()
signal.pthread_sigmask(signal.SIG_BLOCK, {*supervisor.SIGNALS, signal.SIGCHLD})

def old(index):
    (_, control), (asks, _) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # with its parent
        signal.sigwait(supervisor.SIGNALS)
        os._exit(0)
    return Heir(index, pid, control, asks, False, "", "", None)

def member(index, lines, asks):
    if index == 1:
        os.read(ends, 1)
        return 3
    os.write(asks, b'{"serving": true}\\n')
    print(signal.Signals(signal.sigwait(supervisor.SIGNALS)).name, flush=True)
    os.kill(parent, signal.SIGTERM)
    return 0

def heard(self, child):
    read(self, child)
    if child.serving and not child.old:
        os.write(end, b"x")

supervisor.Processes._read_child = heard
before = Inheritance(1, [], [old(0), old(1)], [], {}, "", True, "old", None)
processes = supervisor.Processes(2, member, None, Configured(b"new", b"old"), inherited=before)
sys.exit(processes.run())
"""

HANDED = """

parent, made = os.getpid(), os.memfd_create

def signalled(name):
    os.kill(parent, signal.SIGTERM)
    return made(name)

def execve(*_):
    print(signal.SIGTERM in signal.sigpending())
    for pid in processes._children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    sys.stdout.flush()
    os._exit(0)

def member(index, lines, asks):
    os.kill(parent, supervisor.RETIRE)
    signal.pause()

os.memfd_create, os.execve = signalled, execve
handover.check = lambda: os.posix_spawn("/bin/true", ["true"], os.environ)
processes = supervisor.Processes(1, member, None, Configured(b""))
processes.run()
"""


@pytest.mark.parametrize("moment", ["pipe", "fork", "waitpid"])
def test_a_signal_at_any_moment_ends_all(moment: str) -> None:
    """Just before a member is there, just after, and when one that has ended is no longer its PID's owner."""
    ended = ran(SIGNALLED, moment)
    assert ended.returncode == 0


def test_a_signal_after_all_have_ended_goes_to_no_process() -> None:
    """The process that tries whether a new program could start is waited for last; then its PID is not its own."""
    ended = ran(SIGNALLED_LAST)
    assert ended.returncode == 0


@pytest.mark.parametrize(
    ("how", "end"),
    [
        pytest.param("never serves", "3 1", id="one that ends before it serves ends all, however long it took"),
        pytest.param("has served", "0 2", id="one that has served is started anew, however short its life was"),
        pytest.param("begins", "0 1", id="one that does not serve yet does not hang"),
        pytest.param("hangs", "0 2", id="one that does not serve for minutes is started anew"),
    ],
)
def test_whether_it_has_served_decides_what_its_end_means(how: str, end: str) -> None:
    """`end`: the exit code of all, and how many were started."""
    ended = ran(JUDGED, how)
    assert ended.stdout.strip() == end, ended.stderr


def test_pauses_grow_with_each_short_life() -> None:
    ended = ran(JUDGED, "ends again")
    assert ended.stdout.strip() == "0 4", ended.stderr
    first, second, third = (line for line in ended.stderr.splitlines() if "started anew" in line)
    assert first.endswith("started anew")
    assert "started anew in 0.01 s, as its last lives were short" in second
    assert "started anew in 0.02 s" in third


def test_a_given_up_restart_lets_streams_end() -> None:
    """One of two does not start; the other one serves already, and is retired as an old one would be."""
    given_up = ran(GIVEN_UP)
    assert given_up.stdout.strip() == "SIGUSR2", given_up.stderr
    assert "the proxy that ran serves on" in given_up.stderr


def test_one_that_is_told_to_end_is_retired_once_a_successor_serves() -> None:
    """One that does not start is no successor, and ends nothing. What ends all is no SIGTERM for each of them."""
    ended = ran(TOLD_TO_END)
    assert ended.stdout.split("\n") == ["1 SIGUSR2", "3 SIGINT", ""], ended.stderr
    assert ended.returncode == 0


def test_a_stop_during_a_takeover_is_heard() -> None:
    handed = ran(HANDED)
    assert handed.stdout.strip() == "True", handed.stderr
