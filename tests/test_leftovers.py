"""Whose process it is, when a recorded one is dead and its number names a session."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.launch.fleet import Fleet
from pdserve.plan.model import ExitProbe
from pdserve.reach.protocol import Ready, Stopped
from pdserve.run.directory import RunDir
from pdserve.run.orphans import living, may_be_busy, members, none_held
from pdserve.run.state import DeploymentState, NodeState, ProcessPhase, ProcessState
from pdserve.system import procfs
from pdserve.system.cgroup import Cgroup
from pdserve.system.process import MARKER, pid_end
from pdserve.system.procfs import ProcessId
from pdserve.system.shared_memory import ShmLedger, existing
from tests.launch.deployment import pdserve, recipe
from tests.plan import kit

pytestmark = pytest.mark.process

GONE = ProcessId(pid=4_194_000, start_ticks=1)
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
    here = socket.gethostname()
    engine = ProcessState(role="decode", node="n", phase="dead", id=ProcessId(pid=root, start_ticks=1), died_at=died_at)
    node = NodeState(agent=GONE, guard=GONE, hostname=here)
    return DeploymentState(
        name="fake", run_id="run-1", host=here, launcher=GONE, nodes={"n": node}, processes={"d": engine}, started_at=0
    )


def test_a_session_that_began_after_our_process_had_died_is_a_strangers(
    member: tuple[int, int], tmp_path: Path
) -> None:
    pid, session = member
    run = RunDir.create(tmp_path, "fake", "run-1")
    run.say_alive()
    began = procfs.started_at(procfs.identities([pid])[0])
    assert members(state(session, began - 60), run) == set()
    assert members(state(session, began + 60), run) == {pid}
    assert [str(pid) in line for line in living(state(session, began + 60), run)] == [True]


def test_of_a_death_that_nobody_saw_the_last_sign_of_life_decides(member: tuple[int, int], tmp_path: Path) -> None:
    pid, session = member
    run = RunDir.create(tmp_path, "fake", "run-1")
    run.say_alive()
    assert members(state(session, None), run) == {pid}
    os.utime(run.beat, (time.time() - 60, time.time() - 60))
    assert members(state(session, None), run) == set()
    run.say_gone()
    assert members(state(session, None), run) == set()


def test_the_death_of_an_earlier_life_does_not_count(member: tuple[int, int], tmp_path: Path) -> None:
    pid, session = member
    run = RunDir.create(tmp_path, "fake", "run-1")
    run.say_alive()
    restarted = state(session, procfs.started_at(procfs.identities([pid])[0]) - 60)
    restarted.processes["d"].phase = "ready"
    assert members(restarted, run) == {pid}


@pytest.mark.parametrize("phase", ["done", "stopped"])
def test_what_has_ended_on_purpose_owns_no_session_that_began_later(
    member: tuple[int, int], tmp_path: Path, phase: ProcessPhase
) -> None:
    pid, session = member
    run = RunDir.create(tmp_path, "fake", "run-1")
    run.say_alive()
    began = procfs.started_at(procfs.identities([pid])[0])
    before, after = state(session, began - 60), state(session, began + 60)
    for one in (before, after):
        one.processes["d"].phase = phase
    assert (members(before, run), members(after, run)) == (set(), {pid})


STANDS_STILL = """
import os, signal
signal.signal(signal.SIGCONT, lambda *_: os.kill(os.getpid(), signal.SIGSTOP))
os.kill(os.getpid(), signal.SIGSTOP)
while True:
    signal.pause()
"""


def test_a_supervisor_that_does_not_go_on_is_killed() -> None:
    """As one that a debugger holds."""
    held = subprocess.Popen([sys.executable, "-c", STANDS_STILL])
    one = procfs.identify(held.pid)
    assert one is not None
    deployment = state(0, None)
    deployment.nodes["n"].agent = one
    said: list[str] = []

    async def scenario() -> None:
        async with none_held(deployment, said.append):
            await asyncio.wait_for(pid_end(held.pid), 120)

    try:
        asyncio.run(scenario())
    finally:
        held.kill()
        code = held.wait()
    assert code == -signal.SIGKILL
    assert said[0] == f"agent@n (PID {held.pid}) stood still (SIGSTOP) and was told to go on"
    assert said[-1] == f"agent@n (PID {held.pid}) stood still all the same (a debugger?) and was killed"


def test_a_node_of_which_nothing_is_left_is_not_busy(member: tuple[int, int], tmp_path: Path) -> None:
    pid, session = member
    run = RunDir.create(tmp_path, "fake", "run-1")
    run.say_alive()
    began = procfs.started_at(procfs.identities([pid])[0])
    nothing, something = state(session, began - 60), state(session, began + 60)
    assert (may_be_busy(nothing, run, "n"), may_be_busy(something, run, "n")) == (False, True)
    assert may_be_busy(nothing, run, "never heard of"), "its agent has not said where it is"
    nothing.nodes["n"].hostname = "elsewhere"
    assert may_be_busy(nothing, run, "n"), "nobody can see that from here"


def test_a_process_whose_pid_was_never_recorded_is_found_by_its_name(tmp_path: Path) -> None:
    """Its launcher was held, then all supervisors were killed: the record says only that it was to start."""
    run = RunDir.create(tmp_path, "fake", "run-1")
    deployment = state(GONE.pid, None)
    deployment.processes["d"].phase, deployment.processes["d"].id = "starting", None
    ready = "print(flush=True); import time; time.sleep(1000)"
    child = subprocess.Popen(
        [sys.executable, "-c", ready], env={MARKER: "run-1/d"}, start_new_session=True, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        assert members(deployment, run) == {child.pid}
    finally:
        child.kill()
        child.communicate()


def last_run(home: Path) -> tuple[RunDir, DeploymentState]:
    """The current one of this machine; nothing of it lives."""
    run = RunDir.create(home, "fake", "run-1")
    deployment = state(GONE.pid, None)
    run.write(run.state, deployment.model_dump_json())
    run.point_current()
    return run, deployment


@pytest.mark.parametrize("verb", ["down", "up"])
def test_shared_memory_of_the_last_run_is_removed_when_everything_was_killed_at_once(
    tmp_path: Path, pdserve_home: Path, verb: str
) -> None:
    run, _ = last_run(pdserve_home)
    segment = procfs.SHM / f"psm_{os.getpid()}_{verb}"
    ledger = ShmLedger(run.path / "shm@n.json", strangers=existing())
    try:
        with segment.open("w+"):
            ledger.record([os.getpid()])
        file = recipe(tmp_path)
        shutil.rmtree(tmp_path / "model")  # nothing is to start
        _, output = pdserve(verb, *([file] if verb == "up" else []))
        assert not segment.exists(), output
    finally:
        segment.unlink(missing_ok=True)


def test_down_leaves_alone_what_a_launcher_that_it_cannot_see_holds(pdserve_home: Path) -> None:
    """As one of another PID namespace: its PID means nothing here, its lock does."""
    run, _ = last_run(pdserve_home)
    run.save_key("secret")
    with run.only_launcher():
        code, output = pdserve("down")
    assert code != 0
    assert f"PID {os.getpid()}" in output
    assert run.read_key() == "secret"


@pytest.mark.parametrize("verb", ["down", "up"])
def test_cgroups_of_the_last_run_in_which_nobody_lives_are_removed(
    tmp_path: Path, pdserve_home: Path, verb: str
) -> None:
    run = RunDir.create(pdserve_home, "fake", "run-1")
    deployment = state(GONE.pid, None)
    ours, another_runs = (tmp_path / f"pdserve-{of}@n-7" for of in ("run-1", "run-2"))
    for node, folder in (("n", ours), ("m", another_runs)):
        (folder / "decode-0.1").mkdir(parents=True)
        deployment.nodes[node] = deployment.nodes["n"].model_copy(update={"cgroup": Cgroup.at(folder).id})
    run.write(run.state, deployment.model_dump_json())
    run.point_current()
    file = recipe(tmp_path)
    shutil.rmtree(tmp_path / "model")  # nothing is to start
    _, output = pdserve(verb, *([file] if verb == "up" else []))
    assert (ours.exists(), another_runs.exists()) == (False, True), output


def test_the_end_of_what_is_done_or_was_stopped_is_recorded(tmp_path: Path) -> None:
    plan = kit.plan(kit.recipe())
    first, second, *rest = plan.processes
    first = first.model_copy(update={"probe": ExitProbe()})
    plan = plan.model_copy(update={"processes": (first, second, *rest)})
    run = RunDir.create(tmp_path, "fake", "run-1")
    deployment = state(GONE.pid, None)
    fleet = Fleet(plan, run, deployment, secrets={}, on_event=lambda _: None, end=lambda: None)
    before = time.time()
    deployment.processes[first.name].phase = "starting"
    fleet.receive(Ready(name=first.name, seconds=1.0))
    fleet.receive(Stopped(name=second.name, forced=False, seconds=1.0))
    ended = [deployment.processes[one.name] for one in (first, second)]
    assert [one.phase for one in ended] == ["done", "stopped"]
    assert all(one.died_at is not None and before <= one.died_at <= time.time() for one in ended)
