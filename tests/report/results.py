"""Folders of results and sweeps, as `bench` and `sweep` leave them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pdserve.bench.result import RESULT, Measurement, Window
from pdserve.bench.validity import Reason
from pdserve.bench.workload import Load, Workload
from pdserve.sweep.file import Point, Settings, Variant
from pdserve.sweep.record import PointRecord, SweepFolder
from tests.bench.test_compare import INVALID, measured, result

WORK = Workload(input_tokens=10, output_tokens=5, repeats=1)
WINDOW = Window(
    prefill={
        "computed": 90.0,
        "local_hits": 10.0,
        "queue_seconds": 1.0,
        "prefill_seconds": 2.0,
        "mooncake_bytes": 2.5 * 2**20,
        "mooncake_seconds": 0.25,
    },
    decode={"decode_seconds": 4.0, "received": 100.0, "mooncake_bytes": 0.0, "mooncake_seconds": 0.0},
    proxy={"queue_seconds": 1.0, "transfer_seconds": 3.0},
)


def one(concurrency: int = 4, *, valid: bool = True, ttft: float = 0.1) -> Measurement:
    some = measured(ttft, None if valid else INVALID, concurrency)
    return some.model_copy(update={"window": WINDOW})


def bench_folder(folder: Path, *measurements: Measurement, vllm: str = "0.32.0", recipe: str = "name: d\n") -> Path:
    folder.mkdir(parents=True)
    some = result(*measurements, versions={"vllm": vllm}, recipe=recipe)
    (folder / RESULT).write_text(some.model_dump_json())
    return folder


def sweep_point(
    sweep: SweepFolder,
    settings: Settings,
    measurement: Measurement | None,
    status: Literal["VALID", "INVALID"] = "VALID",
    *reasons: Reason,
    recipe: str = "name: d\n",
    concurrency: int = 4,
) -> None:
    load = Load(requests=20, concurrency=concurrency)
    point = Point(Variant(settings, f"{settings} {recipe}"), WORK, load)
    if measurement is not None:
        bench_folder(sweep.point(point) / "attempt", measurement, recipe=recipe)
    record = PointRecord(
        id=point.id,
        settings=settings,
        workload=WORK,
        load=load,
        status=status,
        reasons=reasons,
        result=None if measurement is None else "attempt",
        seconds=1.0,
    )
    sweep.write(point, record)
