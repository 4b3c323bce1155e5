"""When the counters of a deployment have come to rest."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from pdserve.bench import snapshot
from pdserve.bench.snapshot import Counts, DeploymentSnapshot, Looker
from pdserve.patches.record import PatchRecord
from pdserve.run.directory import RunDir
from pdserve.run.patch_proof import records_folder
from tests.bench.evidence import plan, reading
from tests.doctor import kit

SLOW = Counts(error="no answer within 3 s")


class Scripted(Looker):
    """Reads these, and the last one again and again."""

    def __init__(self, run: RunDir, client: httpx.AsyncClient, readings: Sequence[DeploymentSnapshot]) -> None:
        super().__init__(run, plan(), client)
        self._readings = list(readings)

    async def snapshot(self) -> DeploymentSnapshot:
        return self._readings.pop(0) if len(self._readings) > 1 else self._readings[0]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "_LOOK_SECONDS", 0.0)


def read(computed: float, **changes: Counts) -> DeploymentSnapshot:
    return reading(0.0, {"prefill-0": {"computed": computed}}, **changes)


def settled(run: RunDir, *readings: DeploymentSnapshot) -> DeploymentSnapshot:
    async def settle() -> DeploymentSnapshot:
        async with httpx.AsyncClient() as client:
            return await Scripted(run, client, readings).settled()

    return asyncio.run(settle())


def test_two_equal_readings_are_at_rest(run: RunDir) -> None:
    assert settled(run, read(1.0), read(2.0), read(2.0), read(3.0)).engines["prefill-0"].values == {"computed": 2.0}


def test_two_equal_errors_are_not(run: RunDir) -> None:
    slow = read(1.0, proxy=SLOW)
    assert not settled(run, slow, slow, slow, read(2.0), read(2.0)).proxy.error


def test_where_a_process_has_died_nothing_is_waited_for(run: RunDir) -> None:
    dead = read(1.0, proxy=SLOW).model_copy(update={"phase": "degraded"})
    assert settled(run, dead, dead, read(2.0), read(2.0)).proxy == SLOW


def test_what_can_never_be_read_is_given_back_with_its_error(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "_SETTLE_SECONDS", 0.0)
    assert settled(run, read(1.0, proxy=SLOW)).proxy == SLOW


def test_a_patch_counts_where_all_processes_of_an_engine_report_it_and_not_by_the_plan(tmp_path: Path) -> None:
    deployment = kit.run_dir(tmp_path)
    planned = deployment.read_plan()
    assert "mooncake-pulls" in planned.process("decode-0").patches
    for engine, of_worker in (("decode-0", ("mooncake-pulls", "stale-completions")), ("decode-1", ("load-timeout",))):
        folder = records_folder(deployment, engine)
        folder.mkdir(parents=True)
        for kind, active in (("engine-core", ("mooncake-pulls",)), ("worker", of_worker)):
            record = PatchRecord(pid=1, session=1, process=kind, kind=kind, active=active)
            (folder / f"{kind}.json").write_text(record.model_dump_json())

    async def look_at() -> DeploymentSnapshot:
        nothing = httpx.MockTransport(lambda request: httpx.Response(404))
        async with httpx.AsyncClient(transport=nothing) as client:
            return await Looker(deployment, planned, client).snapshot()

    reported = asyncio.run(look_at()).patches
    assert reported["decode-0"] == ("mooncake-pulls",)
    assert reported["decode-1"] == ()
    assert reported["prefill-0"] == ()
