"""What is read of a deployment around a measurement and during it: counters at rest, KV that was moved, gauges."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from pdserve.bench import snapshot
from pdserve.bench.result import Window
from pdserve.bench.sampling import Peaks, Sample, Sampler, cpu_use
from pdserve.bench.snapshot import ENGINE, Counts, DeploymentSnapshot, Looker, counts, growth
from pdserve.observe.metrics import EngineSnapshot, samples_of
from pdserve.patches.record import PatchRecord
from pdserve.run.directory import RunDir
from pdserve.run.patch_proof import records_folder
from tests.bench.evidence import plan, reading, record
from tests.doctor import kit
from tests.tables import each_row

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


# --- the KV that was moved, whichever connector and side counts it


def test_bytes_and_seconds_of_mooncake_are_those_of_prefill() -> None:
    """Prefill writes; decode has the same series, at 0."""
    page = """
vllm:mooncake_bytes_transferred_bucket{{engine="0",le="+Inf",model_name="tiny"}} 9
vllm:mooncake_bytes_transferred_sum{{engine="0",model_name="tiny"}} {0}
vllm:mooncake_bytes_transferred_sum{{engine="1",model_name="tiny"}} {0}
vllm:mooncake_xfer_time_seconds_sum{{engine="0",model_name="tiny"}} {1}
"""
    before, after_, decode = (
        counts(samples_of(page.format(*values)), ENGINE) for values in ((1024, 0.5), (3 * 2**20, 2.5), (0, 0))
    )
    prefill = growth(before, after_)
    assert prefill == {"mooncake_bytes": 2 * (3 * 2**20 - 1024), "mooncake_seconds": 2.0}
    window = Window(prefill=prefill, decode=growth(decode, decode))
    assert (window.moved_bytes, window.moved_seconds) == (prefill["mooncake_bytes"], 2.0)


def test_bytes_of_nixl_are_those_of_the_side_that_starts_the_transfer() -> None:
    window = Window(prefill={"nixl_bytes": 0.0}, decode={"nixl_bytes": 5.0, "nixl_seconds": 0.5})
    assert (window.moved_bytes, window.moved_seconds) == (5.0, 0.5)


def test_what_no_engine_counts_is_not_zero_bytes() -> None:
    assert (Window().moved_bytes, Window().moved_seconds) == (None, None)


# --- gauges while a client runs

SILENT = EngineSnapshot("http://127.0.0.1:1", error="not listening")
BUSY = EngineSnapshot("http://127.0.0.1:2", running=3, waiting=0, kv_cache_usage=0.5)


@each_row("seen, peaks", [
    ([SILENT, SILENT], Peaks()),
    ([SILENT, BUSY], Peaks(running=3, waiting=0, kv_usage=0.5)),
    ([BUSY, BUSY], Peaks(running=6, waiting=0, kv_usage=0.5)),
])  # fmt: skip
def test_an_engine_that_does_not_answer_has_no_peak(tmp_path: Path, seen: list[EngineSnapshot], peaks: Peaks) -> None:
    looked = asyncio.Event()

    class Seen(Looker):
        async def snapshots(self) -> list[EngineSnapshot]:
            looked.set()
            return seen

    async def sampled() -> Peaks:
        async with httpx.AsyncClient() as client:
            sampler = Sampler(os.getpid(), frozenset(), Seen(RunDir(tmp_path), plan(), client))
            sampling = asyncio.create_task(sampler.run())
            await looked.wait()
            sampling.cancel()
            await asyncio.wait({sampling})
            return sampler.peaks

    assert asyncio.run(sampled()) == peaks


def samples(*wanted: float) -> list[Sample]:
    """One a second, in which the client's process wanted such a share of it."""
    total, samples = 0.0, [Sample(0.0, 0.0, {7: 0.0}, None)]
    for second, share in enumerate(wanted, start=1):
        total += share
        samples.append(Sample(float(second), total, {7: total}, None))
    return samples


@each_row("wanted, seen", [
    ((0.3,) * 100, 0.3),
    ((0.2,) * 40 + (1.0,) * 20 + (0.2,) * 40, 1.0),
    ((0.2,) * 40 + (1.0,) * 5 + (0.2,) * 40, 0.6),
    ((0.2, 1.0), 0.6), ((1.0,) * 12, 1.0),
])  # fmt: skip
def test_a_client_is_as_busy_as_in_its_busiest_ten_seconds(wanted: tuple[float, ...], seen: float) -> None:
    records = [record(started=0.0, e2e=float(len(wanted)))]
    client, _ = cpu_use(samples(*wanted), records)
    assert client.wanted == pytest.approx(seen)
