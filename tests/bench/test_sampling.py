"""What was seen of the engines' gauges while a client ran."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import httpx
import pytest

from pdserve.bench.look import Looker
from pdserve.bench.sampling import Peaks, Sampler
from pdserve.observe.engine_metrics import EngineSnapshot
from pdserve.run.directory import RunDir
from tests.bench.evidence import plan

SILENT = EngineSnapshot("http://127.0.0.1:1", error="not listening")
BUSY = EngineSnapshot("http://127.0.0.1:2", running=3, waiting=0, kv_cache_usage=0.5)


@pytest.mark.parametrize(
    ("seen", "peaks"),
    [
        ([SILENT, SILENT], Peaks()),
        ([SILENT, BUSY], Peaks(running=3, waiting=0, kv_usage=0.5)),
        ([BUSY, BUSY], Peaks(running=6, waiting=0, kv_usage=0.5)),
    ],
    ids=["none-answers", "one-answers", "all-answer"],
)
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
