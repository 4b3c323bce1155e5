"""What was seen of the engines' gauges while a client ran."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import httpx
import pytest

from pdserve.bench.sampling import Peaks, Sample, Sampler, cpu_use
from pdserve.bench.snapshot import Looker
from pdserve.observe.metrics import EngineSnapshot
from pdserve.run.directory import RunDir
from tests.bench.evidence import plan, record
from tests.tables import each_row

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


def samples_of(*wanted: float) -> list[Sample]:
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
    client, _ = cpu_use(samples_of(*wanted), records)
    assert client.wanted == pytest.approx(seen)


def test_a_clock_that_was_set_forth_and_back_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both readings around a run show nothing of it."""
    moved = iter([0.0, 0.0, 30.0, 30.0, 0.0])
    enough = asyncio.Event()

    def wall() -> float:
        try:
            return time.clock_gettime(time.CLOCK_BOOTTIME) + next(moved)
        except StopIteration:
            enough.set()
            return time.clock_gettime(time.CLOCK_BOOTTIME)

    class Silent(Looker):
        async def snapshots(self) -> list[EngineSnapshot]:
            return [SILENT]

    async def sampled() -> float:
        async with httpx.AsyncClient() as client:
            sampler = Sampler(os.getpid(), frozenset(), Silent(RunDir(tmp_path), plan(), client))
            monkeypatch.setattr(time, "time", wall)
            sampling = asyncio.create_task(sampler.run())
            await enough.wait()
            sampling.cancel()
            await asyncio.wait({sampling})
            return sampler.clock_moved

    assert asyncio.run(sampled()) == pytest.approx(30.0, abs=0.1)
