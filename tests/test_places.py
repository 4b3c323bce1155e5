"""Where the PIDs of a record mean something: in one PID namespace of one boot, whatever the machine is called."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.run.directory import RunDir, has_living_launcher
from pdserve.run.orphans import list_living, may_be_busy, members
from pdserve.run.state import NodeState, ProcessState
from pdserve.system import procfs
from pdserve.system.host import is_here
from pdserve.system.procfs import Place, place
from tests.launch.deployment import REPOSITORY, Command, recipe, up
from tests.launch.records import GONE, HERE, recorded_state, write_record
from tests.plan.kit import plan
from tests.plan.kit import recipe as planned_recipe

pytestmark = pytest.mark.process


def ours() -> Place:
    here = place()
    assert here is not None
    return here


def beside() -> Place:
    """Another container that has our hostname, as with `docker run --net=host`."""
    return ours().model_copy(update={"pids": ours().pids + 1})


def another_boot() -> Place:
    return ours().model_copy(update={"boot": "00000000-0000-0000-0000-000000000000"})


@pytest.fixture
def engine() -> Iterator[subprocess.Popen[bytes]]:
    """A process that a record names; whether it is the one that was meant, its place says."""
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as process:
        yield process
        process.kill()


def record(root: Path, engine: subprocess.Popen[bytes], where: Place | None, hostname: str = HERE) -> RunDir:
    """Of a run whose supervisors are all dead, and whose engine has the PID of that process."""
    run = RunDir.create(root, "fake", "run-1")
    [identity] = procfs.identities([engine.pid])
    state = recorded_state(
        phase="ready",
        host=hostname,
        place=where,
        nodes={"n": NodeState(agent=GONE, guard=GONE, hostname=hostname, place=where)},
        processes={"d": ProcessState(role="decode", node="n", phase="ready", id=identity)},
    )
    return write_record(run, state, plan(planned_recipe()))


def seen(run: RunDir) -> set[int]:
    return members(run.read_state(), run)


def down(run: RunDir) -> str:
    """What it says; it is no failure."""
    command = Command("down", "fake", env={"PDSERVE_HOME": str(run.path.parent.parent)})
    assert command.finish() == 0, command.output
    return command.output


def test_pids_of_another_pid_namespace_are_not_taken_for_ours(tmp_path: Path, engine: subprocess.Popen[bytes]) -> None:
    run = record(tmp_path, engine, beside())
    assert seen(run) == set()
    assert list_living(run.read_state(), run) == []
    assert may_be_busy(run.read_state(), run, "n"), "nobody can see that from here"
    output = down(run)
    assert engine.poll() is None, output
    assert "n: in another container (PID namespace) of this machine, and nothing was signalled there" in output


def test_pids_of_an_earlier_boot_mean_nothing(tmp_path: Path, engine: subprocess.Popen[bytes]) -> None:
    output = down(record(tmp_path, engine, another_boot()))
    assert engine.poll() is None, output
    assert output == "fake: not running"


def test_a_machine_that_was_renamed_is_still_this_one(tmp_path: Path, engine: subprocess.Popen[bytes]) -> None:
    run = record(tmp_path, engine, ours(), hostname="its-name-before")
    assert seen(run) == {engine.pid}
    output = down(run)
    assert output.endswith("fake: stopped"), output
    assert engine.wait(60) == -signal.SIGTERM


def test_a_dead_launcher_is_known_by_its_lock(tmp_path: Path, engine: subprocess.Popen[bytes]) -> None:
    """A container that was started again has a fresh sign of life of the one before."""
    run = record(tmp_path, engine, beside())
    run.write_beat()
    with run.only_launcher():
        assert has_living_launcher(run, run.read_state())
    assert not has_living_launcher(run, run.read_state())


def test_launcher_and_agent_record_where_they_are(tmp_path: Path, pdserve_home: Path) -> None:
    with up(recipe(tmp_path), pdserve_home) as deployment:
        deployment.command.expect("serving fake at")
        state = deployment.state()
        assert state.place == ours()
        assert [node.place for node in state.nodes.values()] == [ours()]


def test_a_new_pid_namespace_is_another_place() -> None:
    code = "from pdserve.system.procfs import place; print(place().model_dump_json())"
    new = ["unshare", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*new, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no new PID namespace may be made here")
    output = subprocess.run([*new, sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, check=True).stdout
    there = Place.model_validate_json(output)
    assert (there.boot == ours().boot, there == ours()) == (True, False)
    assert not is_here(HERE, there)
