"""Whose process it is, when a recorded one is dead and its number names a session."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pdserve.errors import StateError
from pdserve.node.agent_record import AgentRecord
from pdserve.run.directory import RunDir
from pdserve.run.orphans import list_living, may_be_busy, members, stop_left
from pdserve.run.state import DeploymentState, NodeState, ProcessPhase, ProcessState
from pdserve.system import process, procfs
from pdserve.system.cgroup import Cgroup
from pdserve.system.process import MARKER, marker
from pdserve.system.procfs import ProcessId
from pdserve.system.shared_memory import ShmLedger, segment_inodes
from tests.launch.deployment import pdserve, recipe
from tests.launch.records import GONE, HERE, identity_of, recorded_state, write_record
from tests.tables import each_row

pytestmark = pytest.mark.process

LEFT = "import os, sys, time; os.fork() and os._exit(0); print(os.getpid(), flush=True); time.sleep(1000)"
"""A session whose leader has exited, and a member of it."""


@pytest.fixture
def member() -> Iterator[tuple[int, int]]:
    """(PID, number of its session)."""
    leader = subprocess.Popen([sys.executable, "-c", LEFT], start_new_session=True, stdout=subprocess.PIPE)
    assert leader.stdout is not None
    pid = int(leader.stdout.readline())
    leader.wait()
    yield pid, leader.pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)  # orphans become children of this process (tests/conftest.py)
    leader.stdout.close()


def state(root: int, died_at: float | None) -> DeploymentState:
    """Of a run whose one engine, the leader of that session, is dead."""
    engine = ProcessState(role="decode", node="n", phase="dead", id=ProcessId(pid=root, start_ticks=1), died_at=died_at)
    return recorded_state(nodes={"n": NodeState(agent=GONE, guard=GONE, hostname=HERE)}, processes={"d": engine})


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Of a launcher that was heard a moment ago."""
    made = RunDir.create(tmp_path, "fake", "run-1")
    made.write_beat()
    return made


def beginning(pid: int) -> float:
    [identity] = procfs.identities([pid])
    return procfs.started_at(identity)


@each_row("phase, died, heard, ours", [
    ("dead", -60, 0, False),
    ("dead", +60, 0, True),
    ("done", -60, 0, False),
    ("done", +60, 0, True),
    ("stopped", -60, 0, False),
    ("stopped", +60, 0, True),
    ("ready", -60, 0, True),
    ("dead", None, 0, True),
    ("dead", None, 60, False),
    ("dead", None, None, False),
])  # fmt: skip
def test_a_session_that_began_after_the_death_is_a_strangers(
    member: tuple[int, int], run: RunDir, phase: ProcessPhase, died: float | None, heard: float | None, ours: bool
) -> None:
    """`died`: its leader, so many seconds after it began, which says nothing of a later life. Of a death that nobody
    saw the last sign of life decides: `heard` so many seconds ago."""
    pid, session = member
    recorded = state(session, None if died is None else beginning(pid) + died)
    recorded.processes["d"].phase = phase
    if heard is None:
        run.remove_beat()
    else:
        run.write_beat()
        os.utime(run.beat, (time.time() - heard, time.time() - heard))
    assert members(recorded, run) == ({pid} if ours else set())
    assert [str(pid) in line for line in list_living(recorded, run)] == ([True] if ours else [])


def test_no_record_makes_pid_1_the_caller_or_what_is_above_it_a_member(run: RunDir) -> None:
    """Whatever it has: a session of PID 1, or the command's own parent as an engine that lives."""
    assert members(state(1, time.time() + 60), run) == set()
    parent = identity_of(os.getppid())
    recorded = state(parent.pid, None)
    lives = recorded.processes["d"].model_copy(update={"id": parent, "phase": "ready"})
    assert not members(recorded.model_copy(update={"processes": {"d": lives}}), run) & {1, parent.pid, os.getpid()}


@pytest.mark.parametrize("pid", [0, -1])
def test_a_record_with_a_pid_that_is_none_is_refused(run: RunDir, pid: int) -> None:
    """Session 0 is that of PID 1 and the kernel's threads: `down` once took all of them for ours."""
    written = json.loads(state(GONE.pid, 1.0).model_dump_json())
    written["processes"]["d"]["id"]["pid"] = pid
    run.write(run.state, json.dumps(written))
    with pytest.raises(StateError, match=r"this state\.json is damaged"):
        run.read_state()


def test_a_node_of_which_nothing_is_left_is_not_busy(member: tuple[int, int], run: RunDir) -> None:
    pid, session = member
    began = beginning(pid)
    nothing, something = state(session, began - 60), state(session, began + 60)
    assert (may_be_busy(nothing, run, "n"), may_be_busy(something, run, "n")) == (False, True)
    assert may_be_busy(nothing, run, "never heard of"), "its agent has not said where it is"
    nothing.nodes["n"].hostname = "elsewhere"
    assert may_be_busy(nothing, run, "n"), "nobody can see that from here"


TOKEN = "0123456789abcdef"
CARRIES = """
import os, sys
os.setsid()
if os.fork():
    os._exit(0)
code = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"
os.execve(sys.executable, [sys.executable, "-c", code], dict([sys.argv[1].split("=")]))
"""
"""An orphan with a name in its environment; who led its session has ended."""


@contextmanager
def carrier(name: str) -> Iterator[int]:
    """Its PID."""
    parent = subprocess.Popen([sys.executable, "-c", CARRIES, f"{MARKER}={name}"], env={}, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        parent.communicate()
        os.waitpid(pid, 0)  # orphans become children of this process (tests/conftest.py)


def all_killed() -> DeploymentState:
    """A run of which a process was to start; then all supervisors were killed."""
    deployment = state(GONE.pid, None)
    deployment.token = TOKEN
    deployment.processes["d"].phase, deployment.processes["d"].id = "starting", None
    return deployment


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        (f"run-1/{TOKEN}/d.1", True),
        ("run-1/d", False),
        ("run-1/another/d.1", False),
        (f"run-2/{TOKEN}/d.1", False),
    ],
    ids=["ours", "by hand", "another token", "another run"],
)
def test_a_process_without_a_pid_is_found_by_its_name(run: RunDir, name: str, ours: bool) -> None:
    deployment = all_killed()
    with carrier(name) as pid:
        assert members(deployment, run) == ({pid} if ours else set())


def test_of_a_guard_that_has_left_by_itself_nothing_is_left(run: RunDir) -> None:
    """Who carries the name then has a copy of it."""
    deployment = all_killed()
    record = AgentRecord(guard=GONE, hostname=socket.gethostname(), place=None, cgroup=None)
    with carrier(marker("run-1", TOKEN, "d.1")) as pid:
        for over, ours in ((False, {pid}), (True, set())):
            (run.path / "agent@n-1.json").write_text(record.model_copy(update={"over": over}).model_dump_json())
            assert members(deployment, run) == ours


async def test_what_could_not_be_stopped_is_not_called_stopped(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """As another user's, whom our signals do not reach."""
    with subprocess.Popen(["sleep", "600"]) as member:
        deployment = state(GONE.pid, None)
        deployment.processes["d"].id, deployment.processes["d"].phase = identity_of(member.pid), "ready"
        with monkeypatch.context() as refused:
            refused.setattr(process, "send", lambda target, signum: False)
            refused.setattr(process, "_KILL_SECONDS", 0.1)
            said = await stop_left(deployment, run)
        assert said.startswith("1 process(es) cannot be stopped (another user's")
        assert f"PID {member.pid} sleep 600" in said
        assert await stop_left(deployment, run) == "what its agents had left was stopped by the launcher"
        assert member.wait() == -signal.SIGTERM


@pytest.mark.parametrize("verb", ["down", "up"])
def test_what_the_last_run_has_left_is_removed(tmp_path: Path, pdserve_home: Path, verb: str) -> None:
    run, deployment = RunDir.create(pdserve_home, "fake", "run-1"), state(GONE.pid, None)
    ours, another_runs = (tmp_path / f"pdserve-{of}@n-7" for of in ("run-1", "run-2"))
    for node, folder in (("n", ours), ("m", another_runs)):
        (folder / "decode-0.1").mkdir(parents=True)
        deployment.nodes[node] = deployment.nodes["n"].model_copy(update={"cgroup": Cgroup.at(folder).id})
    write_record(run, deployment)
    segment = procfs.SHM / f"psm_{os.getpid()}_{verb}"
    ledger = ShmLedger(run.path / "shm@n.json", strangers=segment_inodes())
    try:
        with segment.open("w+") as held, subprocess.Popen(["sleep", "600"], stdin=held) as holder:
            ledger.record([holder.pid])
            holder.kill()
        file = recipe(tmp_path)
        shutil.rmtree(tmp_path / "model")  # nothing is to start
        _, output = pdserve(verb, *([file] if verb == "up" else []))
        assert not segment.exists(), output
        assert (ours.exists(), another_runs.exists()) == (False, True), output
    finally:
        segment.unlink(missing_ok=True)


def test_down_leaves_alone_what_a_launcher_that_it_cannot_see_holds(pdserve_home: Path) -> None:
    """As one of another PID namespace: its PID means nothing here, its lock does."""
    run = write_record(RunDir.create(pdserve_home, "fake", "run-1"), state(GONE.pid, None))
    run.save_key("secret")
    with run.only_launcher():
        code, output = pdserve("down")
    assert code != 0
    assert f"PID {os.getpid()}" in output
    assert run.read_key() == "secret"
