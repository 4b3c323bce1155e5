"""`pdserve down` once the launcher has answered, and ended."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pdserve.operations import down
from pdserve.run.directory import RunDir
from pdserve.run.inbox import Reply
from pdserve.run.state import DeploymentState, NodeState
from pdserve.system import procfs
from pdserve.system.process import new_token
from pdserve.system.procfs import ProcessId
from tests.launch.deployment import LINE_SECONDS
from tests.plan import kit

pytestmark = pytest.mark.process
GONE = ProcessId(pid=4_194_000, start_ticks=1)


def left_elsewhere(run: RunDir) -> DeploymentState:
    """Recorded: of a launcher on another machine that is gone, whose agents are on others."""
    node = NodeState(agent=GONE, guard=GONE, hostname="far.invalid")
    return DeploymentState(
        token=new_token(),
        name="fake",
        run_id=run.run_id,
        phase="ready",
        host="elsewhere",
        launcher=GONE,
        nodes={"far": node},
        started_at=0,
    )


@pytest.mark.parametrize(("planned", "seconds"), [(kit.plan(kit.recipe()).model_dump_json(), 15), ("{}", None)])
def test_agents_elsewhere_are_named_also_where_the_plan_is_of_another_version(
    pdserve_home: Path, planned: str, seconds: int | None
) -> None:
    run = RunDir.create(pdserve_home, "fake", "run-1")
    run.point_current()
    run.write(run.plan, planned)
    run.write(run.state, left_elsewhere(run).model_dump_json())
    said: list[str] = []
    down.down("fake", said.append)
    end = "" if seconds is None else f", at the latest {seconds} s after it"
    assert said[-1].endswith(f"the agents of far stop what runs there by themselves{end}")


def test_agents_get_the_time_of_their_plan_after_the_death_of_their_launcher(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "fake", "run-1")
    planned = kit.plan(kit.recipe({"timeouts": {"stop_seconds": 600}}))
    run.write(run.plan, planned.model_dump_json())
    assert down._patience(run) > 2 * 600


def test_it_does_not_wait_for_a_stranger_with_the_pid_of_the_launcher(
    pdserve_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(down, "lives", lambda *_: True)  # it did when that was asked
    monkeypatch.setattr(down, "ask", lambda *_, **__: Reply(exit_code=0, message="stopped"))
    run = RunDir.create(pdserve_home, "fake", "run-1")
    run.point_current()
    said: list[str] = []
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        launcher = ProcessId(pid=stranger.pid, start_ticks=1)
        host, place = socket.gethostname(), procfs.place()
        state = DeploymentState(
            token=new_token(), name="fake", run_id="run-1", host=host, place=place, launcher=launcher, started_at=0.0
        )
        run.write(run.state, state.model_dump_json())
        verb = threading.Thread(target=down.down, args=("fake", said.append))
        verb.start()
        verb.join(LINE_SECONDS)
        heard = list(said)
        assert stranger.poll() is None
        stranger.kill()
        verb.join()
    assert heard == ["fake: stopped"]
