"""`pdserve down` once the launcher has answered, and ended."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pdserve.operations import down
from pdserve.run.directory import RunDir
from pdserve.run.inbox import Reply
from pdserve.run.state import NodeState
from pdserve.system import procfs
from pdserve.system.procfs import ProcessId
from tests.launch.deployment import LINE_SECONDS
from tests.launch.records import GONE, recorded_state, write_record
from tests.plan import kit

pytestmark = pytest.mark.process


@pytest.mark.parametrize(("planned", "seconds"), [(kit.plan(kit.recipe()).model_dump_json(), 15), ("{}", None)])
def test_agents_elsewhere_are_named_also_where_the_plan_is_of_another_version(
    pdserve_home: Path, planned: str, seconds: int | None
) -> None:
    far = {"far": NodeState(agent=GONE, guard=GONE, hostname="far.invalid")}
    run = RunDir.create(pdserve_home, "fake", "run-1")
    write_record(run, recorded_state(phase="ready", host="elsewhere", nodes=far))
    run.write(run.plan, planned)
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
    said: list[str] = []
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        launcher = ProcessId(pid=stranger.pid, start_ticks=1)
        write_record(run, recorded_state(place=procfs.place(), launcher=launcher))
        verb = threading.Thread(target=down.down, args=("fake", said.append))
        verb.start()
        verb.join(LINE_SECONDS)
        heard = list(said)
        assert stranger.poll() is None
        stranger.kill()
        verb.join()
    assert heard == ["fake: stopped"]
