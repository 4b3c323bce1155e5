"""Folders of results and sweeps, as `bench` and `sweep` leave them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, Literal

from pdserve.bench.result import RESULT, BenchResult, Measurement, Window
from pdserve.bench.snapshot import Clocks, DeploymentSnapshot
from pdserve.bench.validity import BenchVerdict, Reason
from pdserve.bench.workload import Load, Workload
from pdserve.sweep.file import Point, Settings, Variant
from pdserve.sweep.record import PointRecord, SweepFolder
from tests.bench.evidence import reading
from tests.sweep.test_compare import INVALID, measured, result

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
    lmcache={"asked_tokens": 100.0, "hit_tokens": 2.0},
    proxy={"queue_seconds": 1.0, "transfer_seconds": 3.0},
)


def one(concurrency: int = 4, *, valid: bool = True, ttft: float = 0.1) -> Measurement:
    some = measured(ttft, None if valid else INVALID, concurrency)
    return some.model_copy(update={"window": WINDOW})


def keep(folder: Path, some: BenchResult) -> Path:
    folder.mkdir(parents=True)
    (folder / RESULT).write_text(some.model_dump_json())
    return folder


def bench_folder(folder: Path, *measurements: Measurement, vllm: str = "0.32.0", recipe: str = "name: d\n") -> Path:
    return keep(folder, result(*measurements, versions={"vllm": vllm}, recipe=recipe))


def sweep_point(
    sweep: SweepFolder,
    settings: Settings,
    measured: Measurement | BenchResult | None,
    status: Literal["VALID", "INVALID"] = "VALID",
    *reasons: Reason,
    recipe: str = "name: d\n",
    concurrency: int = 4,
    run_id: str | None = None,
) -> None:
    load = Load(requests=20, concurrency=concurrency)
    point = Point(Variant(settings, f"{settings} {recipe}"), WORK, load)
    if measured is not None:
        some = result(measured, recipe=recipe) if isinstance(measured, Measurement) else measured
        keep(sweep.point(point) / "attempt", some)
    record = PointRecord(
        id=point.id,
        settings=settings,
        workload=WORK,
        load=load,
        status=status,
        reasons=reasons,
        result=None if measured is None else "attempt",
        run_id=run_id,
        seconds=1.0,
    )
    sweep.write(point, record)


# --- a sweep as a user's folder has it: caches off and on under four loads, a death on the way, a start that failed

LOADS, REPEATS = (1, 4, 8, 16), 3
BEGAN = 1_795_000_000.0
STEP = 60.0
"""Seconds between the beginnings of two measurements."""
OFF: Settings = (("lmcache", "null"),)
ON: Settings = (("lmcache", "{l1_size_gb: 1}"),)
BROKEN: Settings = (("lmcache", "{l1_size_gb: 4000}"),)
RUNS = {OFF: "20261121-102640-aaaaaa", ON: "20261121-111320-bbbbbb", BROKEN: "20261121-120000-cccccc"}
DIED = Reason(check="processes", text="decode-0 died; decode-0 is being restarted")


def realistic_sweep(folder: Path, *, faster: float = 1.0, vllm: str = "0.32.0") -> Path:
    """The folder of the sweep."""
    sweep = SweepFolder(folder)
    for place, settings in enumerate((OFF, ON)):
        began, run_id = BEGAN + place * 2800.0, RUNS[settings]
        for step, concurrency in enumerate(LOADS):
            dies = settings is ON and concurrency == LOADS[-1]
            at = began + 30 + step * REPEATS * STEP
            some = realistic_result(concurrency, began=at, faster=faster, vllm=vllm, dies=dies, run_id=run_id)
            why = ("INVALID", DIED) if dies else ("VALID",)
            sweep_point(sweep, settings, some, *why, concurrency=concurrency, run_id=run_id)
        _events(sweep, run_id, began, dies=settings is ON)
    failed = Reason(check="start", text="error: this host has too little memory\n  likely cause: l1_size_gb is 4000")
    sweep_point(sweep, BROKEN, None, "INVALID", failed, run_id=RUNS[BROKEN])
    return folder


def realistic_result(
    concurrency: int, *, began: float, faster: float = 1.0, vllm: str = "0.32.0", dies: bool = False, run_id: str = "r"
) -> BenchResult:
    """A single load; where decode `dies`, it does so during the second repeat."""
    noise = random.Random(f"{concurrency} {faster}")
    measurements = []
    for repeat in range(REPEATS):
        verdict = BenchVerdict(status="INVALID", reasons=(DIED,)) if dies and repeat == 1 else None
        some = measured((0.08 + 0.02 * concurrency) / faster * noise.uniform(0.97, 1.03), verdict, concurrency)
        at = began + repeat * STEP
        ends = {"before": _reading(at, run_id), "after": _reading(at + 0.8 * STEP, run_id)}
        measurements.append(some.model_copy(update={"repeat": repeat, "window": WINDOW, **ends}))
    return result(
        *measurements,
        run_id=run_id,
        versions={"pdserve": "0.1.0", "git_revision": "a75b4b1f00d1", "vllm": vllm},
        hardware={"gpus": "0, NVIDIA H100 80GB HBM3, 81559 MiB, 570.86.15"},
    )


def _reading(at: float, run_id: str) -> DeploymentSnapshot:
    clocks = Clocks(wall=at, monotonic=at)
    return reading(0.0, {"prefill-0": {"computed": 1.0}}, clocks=clocks, run_id=run_id)


def _events(sweep: SweepFolder, run_id: str, began: float, *, dies: bool) -> None:
    """The history of a start, to its end."""
    names = ("prefill-0", "decode-0", "proxy")
    events: list[tuple[float, str, dict[str, Any]]] = []
    for number, name in enumerate(names):
        events.append((0.1 * number, "start", {"name": name, "node": "node-1"}))
        events.append((4.0 + 6 * number, "ready", {"name": name, "seconds": 4.0}))
    events.append((25.0, "phase", {"phase": "ready"}))
    if dies:
        at = 30 + (3 * REPEATS + 1) * STEP + 20
        events += [
            (at, "died", {"name": "decode-0", "code": -9, "how": "was killed by SIGKILL"}),
            (at + 0.2, "restarting", {"name": "decode-0", "attempt": 1, "after_seconds": 2}),
            (at + 2.2, "start", {"name": "decode-0", "node": "node-1"}),
            (at + 28, "ready", {"name": "decode-0", "seconds": 25.8}),
        ]
    end = 30 + len(LOADS) * REPEATS * STEP
    for number, name in enumerate(reversed(names)):
        events.append((end + number, "stop", {"name": name, "node": "node-1"}))
        events.append((end + number + 1, "stopped", {"name": name, "forced": False, "seconds": 1.0}))
    events.append((end + len(names) + 1, "down", {"phase": "stopped", "clean": True}))
    file = sweep.events(run_id)
    file.parent.mkdir(parents=True)
    file.write_text("".join(json.dumps({"at": began + at, "event": kind, **more}) + "\n" for at, kind, more in events))
