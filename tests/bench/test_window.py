"""What is read of a deployment around a measurement and during it: counters at rest, KV that was moved, gauges."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from pdserve.bench import snapshot
from pdserve.bench.result import Window
from pdserve.bench.snapshot import CounterReader, Counts, CpuSample, DeploymentSnapshot, Peaks, cpu_use, peaks_of
from pdserve.observe.metrics import EngineSnapshot
from pdserve.run.directory import RunDir
from tests.bench.evidence import plan, reading, record
from tests.tables import each_row

SLOW = Counts(error="no answer within 3 s")


def read(computed: float, **changes: Counts) -> DeploymentSnapshot:
    return reading(0.0, {"prefill-0": {"computed": computed}}, **changes)


def settled(folder: Path, *readings: DeploymentSnapshot) -> DeploymentSnapshot:
    """Where these are read one after the other."""
    left = iter(readings)

    class Scripted(CounterReader):
        async def snapshot(self) -> DeploymentSnapshot:
            return next(left)

    async def settle() -> DeploymentSnapshot:
        async with httpx.AsyncClient() as client:
            return await Scripted(RunDir(folder), plan(), client).settled()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(snapshot, "_LOOK_SECONDS", 0.0)
        return asyncio.run(settle())


def test_two_equal_readings_are_at_rest(tmp_path: Path) -> None:
    assert settled(tmp_path, read(1.0), read(2.0), read(2.0), read(3.0)).engines["prefill-0"].values == {
        "computed": 2.0
    }


def test_where_a_process_has_died_nothing_is_waited_for(tmp_path: Path) -> None:
    dead = read(1.0, proxy=SLOW).model_copy(update={"phase": "degraded"})
    assert settled(tmp_path, dead, dead, read(2.0), read(2.0)).proxy == SLOW


@each_row("prefill, decode, moved", [
    # Prefill writes with Mooncake, and decode reads with NIXL.
    ({"mooncake_bytes": 3.0, "mooncake_seconds": 2.0}, {"mooncake_bytes": 0.0, "mooncake_seconds": 0.0}, (3.0, 2.0)),
    ({"nixl_bytes": 0.0}, {"nixl_bytes": 5.0, "nixl_seconds": 0.5}, (5.0, 0.5)),
    ({}, {}, (None, None)),
])  # fmt: skip
def test_kv_that_was_moved_is_that_of_the_side_that_moves_it(
    prefill: dict[str, float], decode: dict[str, float], moved: tuple[float | None, float | None]
) -> None:
    window = Window(prefill=prefill, decode=decode)
    assert (window.moved_bytes, window.moved_seconds) == moved


# --- gauges while a client runs

SILENT = EngineSnapshot("http://127.0.0.1:1", error="not listening")
BUSY = EngineSnapshot("http://127.0.0.1:2", running=3, waiting=0, kv_cache_usage=0.5)


@each_row("readings, peaks", [
    ([[SILENT, SILENT]], Peaks()),
    ([[SILENT, BUSY]], Peaks(running=3, waiting=0, kv_usage=0.5)),
    ([[BUSY, BUSY], [SILENT, BUSY]], Peaks(running=6, waiting=0, kv_usage=0.5)),
])  # fmt: skip
def test_an_engine_that_does_not_answer_has_no_peak(readings: list[list[EngineSnapshot]], peaks: Peaks) -> None:
    assert peaks_of(readings) == peaks


def samples(*wanted: float) -> list[CpuSample]:
    """One a second, in which the client's process wanted such a share of it."""
    total, samples = 0.0, [CpuSample(0.0, 0.0, {7: 0.0}, None)]
    for second, share in enumerate(wanted, start=1):
        total += share
        samples.append(CpuSample(float(second), total, {7: total}, None))
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
