"""The parent of the proxy's processes by itself: signals, processes that end, hang or do not start. Each test runs it
as a program of its own, with members that the test makes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.nursery import REPOSITORY

pytestmark = pytest.mark.process


SCRIPTS = """
import itertools, os, signal, sys, time
from pdserve.pd.processes import supervisor
from pdserve.pd.processes import heartbeat, supervisor
from pdserve.pd.processes.child import MemberConfiguration
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
sys.exit(supervisor.Processes(3, member, None, MemberConfiguration(b"")).run())
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
    if how == "hangs" and len(forks) == 2:
        os.write(asks, b'{"serving": true}\\n')
        os.kill(parent, signal.SIGTERM)
    if how == "leaves":
        if len(forks) == 2:
            return 3  # the first successor does not start
        os.write(asks, b'{"serving": true}\\n')
        if len(forks) == 1:
            os.write(asks, b'{"leaving": true}\\n')
        else:
            os.kill(parent, signal.SIGTERM)
    signal.sigwait(supervisor.SIGNALS)
    return 0

os.fork, beats, supervisor._FIRST_SECONDS = counted, None, 0.01
if how == "never serves":
    time.monotonic = lambda: next(clock)  # whatever it does takes ten seconds, as imports on a slow node
if how == "begins":
    look, heartbeat.Vigil.look = heartbeat.Vigil.look, looked
    heartbeat.BEAT_SECONDS, heartbeat.HUNG_SECONDS, beats = 0.001, 0.0, Beats.create(1)
if how == "hangs":
    heartbeat.BEAT_SECONDS, beats = 0.001, Beats.create(1)
code = supervisor.Processes(1, member, None, MemberConfiguration(b""), beats=beats).run()
print(code, len(forks))
"""


@pytest.mark.parametrize("moment", ["pipe", "fork", "waitpid"])
def test_a_signal_at_any_moment_ends_all(moment: str) -> None:
    """Just before a member is there, just after, and when one that has ended is no longer its PID's owner."""
    ended = ran(SIGNALLED, moment)
    assert ended.returncode == 0


@pytest.mark.parametrize(
    ("how", "end"),
    [
        pytest.param("never serves", "3 1", id="one that ends before it serves ends all, however long it took"),
        pytest.param("has served", "0 2", id="one that has served is started anew, however short its life was"),
        pytest.param("begins", "0 1", id="one that does not serve yet does not hang"),
        pytest.param("hangs", "0 2", id="one that does not serve for minutes is started anew"),
        pytest.param("leaves", "0 3", id="one that does not start is no successor and ends nothing"),
    ],
)
def test_whether_it_has_served_decides_what_its_end_means(how: str, end: str) -> None:
    """`end`: the exit code of all, and how many were started."""
    ended = ran(JUDGED, how)
    assert ended.stdout.strip() == end, ended.stderr
