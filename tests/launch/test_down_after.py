"""`pdserve down` once the launcher has answered, and ended; and how long a verb waits for that answer."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pdserve.cli.run import restart
from pdserve.errors import StateError
from pdserve.operations import down, up
from pdserve.operations.look import CheckedPlan
from pdserve.operations.progress import ShownProgress
from pdserve.plan.model import Plan, Versions
from pdserve.run import inbox
from pdserve.run.directory import RunDir
from pdserve.run.inbox import Reply
from pdserve.run.state import NodeState
from pdserve.system import procfs
from pdserve.system.procfs import ProcessId
from tests.launch.deployment import LINE_SECONDS
from tests.launch.records import GONE, own_identity, recorded_state, write_record
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


def test_it_does_not_wait_for_a_stranger_with_the_pid_of_the_launcher(
    pdserve_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(down, "has_living_launcher", lambda *_: True)  # it did when that was asked
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


# What a verb asks of a launcher may take as long as the recipe lets it: the verb waits for it


DRAIN = 900.0


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long each verb would wait for the answer. It ends once it has asked."""
    waited: list[float] = []

    def ask(*_: Any, seconds: float, **__: Any) -> None:
        waited.append(seconds)
        raise StateError("asked")

    for verb in (up, down, inbox):
        monkeypatch.setattr(verb, "ask", ask)
    return waited


@pytest.fixture
def run(pdserve_home: Path) -> RunDir:
    """Of a deployment whose launcher lives: it is this process."""
    state = recorded_state(name="test", place=procfs.place(), launcher=own_identity())
    return write_record(RunDir.create(pdserve_home, "test", "r1"), state, planned())


def planned(*changes: dict[str, Any]) -> Plan:
    quick = {"proxy": {"drain_seconds": DRAIN}, "timeouts": {"engine_seconds": 60}}
    return kit.plan(kit.recipe(quick, *changes))


def test_down_lets_the_proxy_drain_and_the_other_stages_stop(run: RunDir, asked: list[float]) -> None:
    with pytest.raises(StateError):
        down.down("test", print)
    assert asked[0] > sum({process.stop_stage: process.stop_seconds for process in planned().processes}.values())


@pytest.mark.parametrize("name", ["proxy", "decode-0"])
def test_restart_lets_requests_finish_first(run: RunDir, asked: list[float], name: str) -> None:
    with pytest.raises(StateError):
        restart(name, "test")
    assert asked[0] > DRAIN + planned().timeouts.engine_seconds * (name != "proxy")


def test_up_with_another_model_lets_its_weights_be_fetched(run: RunDir, asked: list[float]) -> None:
    other = planned({"model": {"path": None, "id": "org/model"}})
    loaded = SimpleNamespace(to_yaml=lambda model_path: "name: test")
    seen = cast(CheckedPlan, SimpleNamespace(planned=SimpleNamespace(plan=other, loaded=loaded, versions=Versions())))
    with pytest.raises(StateError):
        up.ask_to_apply(run, seen, cast(ShownProgress, SimpleNamespace(result=print)), replace=True)
    assert asked[0] > other.timeouts.weights_seconds + DRAIN
