"""What a verb asks of a launcher may take as long as the recipe lets it: the verb waits for it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pdserve.operations import down, restart, up
from pdserve.operations.look import CheckedPlan
from pdserve.operations.up import VerbProgress
from pdserve.plan.model import Plan, Versions
from pdserve.run.directory import RunDir
from pdserve.system import procfs
from tests.launch.records import own_identity, recorded_state, write_record
from tests.plan import kit

DRAIN = 900.0
MODEL = {"model": {"path": None, "id": "org/model"}}


class Asked(Exception):  # noqa: N818  (ends a verb once it has asked)
    """The seconds that it would wait for the answer."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


def ask(*_: Any, seconds: float, **__: Any) -> None:
    raise Asked(seconds)


@pytest.fixture
def run(pdserve_home: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Of a deployment whose launcher lives: it is this process."""
    for verb in (up, down, restart):
        monkeypatch.setattr(verb, "ask", ask)
    state = recorded_state(name="test", place=procfs.place(), launcher=own_identity())
    return write_record(RunDir.create(pdserve_home, "test", "r1"), state, planned())


def planned(*changes: dict[str, Any]) -> Plan:
    quick = {"proxy": {"drain_seconds": DRAIN}, "timeouts": {"engine_seconds": 60}}
    return kit.plan(kit.recipe(quick, *changes))


def patience(verb: Callable[[], object]) -> float:
    with pytest.raises(Asked) as asked:
        verb()
    return asked.value.seconds


def test_down_lets_the_proxy_drain_and_the_other_stages_stop(run: RunDir) -> None:
    stops: Collection[float] = {process.stop_stage: process.stop_seconds for process in planned().processes}.values()
    assert patience(lambda: down.down("test", print)) > sum(stops) > DRAIN


@pytest.mark.parametrize("name", ["proxy", "decode-0"])
def test_restart_lets_requests_finish_first(run: RunDir, name: str) -> None:
    usual = planned().timeouts
    assert patience(lambda: restart.restart(name, "test")) > DRAIN + usual.engine_seconds * (name != "proxy")


def test_up_with_another_model_lets_its_weights_be_fetched(run: RunDir) -> None:
    other = planned(MODEL)
    loaded = SimpleNamespace(to_yaml=lambda model_path: "name: test")
    seen = cast(CheckedPlan, SimpleNamespace(planned=SimpleNamespace(plan=other, loaded=loaded, versions=Versions())))
    show = cast(VerbProgress, SimpleNamespace(result=print))
    assert patience(lambda: up.apply(run, seen, show, replace=True)) > other.timeouts.weights_seconds + DRAIN
