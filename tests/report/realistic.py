"""A sweep as a user's folder has it: caches off and on under four loads, a death on the way, a start that failed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, Literal

from pdserve.bench.figures import RequestRecord, figures
from pdserve.bench.result import RESULT, BenchResult, Measurement, Provenance, Window
from pdserve.bench.snapshot import Clocks, Counts
from pdserve.bench.validity import BenchVerdict, Reason
from pdserve.bench.workload import Load, Workload
from pdserve.sweep.file import Point, Settings, Variant
from pdserve.sweep.record import PointRecord, SweepFolder
from tests.bench.evidence import reading

INPUT, OUTPUT, REQUESTS, REPEATS = 1024, 16, 16, 3
LOADS = (1, 4, 8, 16)
BEGAN = 1_795_000_000.0
WORK = Workload(input_tokens=INPUT, output_tokens=OUTPUT, repeats=REPEATS)
OFF: Settings = (("prefill.connector", "{kind: mooncake, protocol: tcp}"), ("lmcache", "null"))
ON: Settings = (
    ("prefill.connector", "{kind: multi, of: [{kind: mooncake, protocol: tcp}, {kind: lmcache-mp}]}"),
    ("lmcache", "{l1_size_gb: 1, transfer_mode: auto}"),
)
BROKEN: Settings = (("prefill.connector", "{kind: mooncake, protocol: tcp}"), ("lmcache", "{l1_size_gb: 4000}"))
RUNS = {OFF: "20261121-102640-aaaaaa", ON: "20261121-111320-bbbbbb", BROKEN: "20261121-120000-cccccc"}
_STEP = 60.0
"""Seconds between the beginnings of two measurements."""
_DIED = Reason(check="processes", text="decode-0 died; decode-0 is being restarted")


def realistic_sweep(folder: Path, *, gpus: int = 2, faster: float = 1.0, vllm: str = "0.32.0") -> Path:
    """The folder of the sweep."""
    sweep = SweepFolder(folder)
    for place, settings in enumerate((OFF, ON)):
        began = BEGAN + place * 2800.0
        for step, concurrency in enumerate(LOADS):
            dies = settings is ON and concurrency == LOADS[-1]
            at, speed = began + 30 + step * REPEATS * _STEP, faster * (1.15 if settings is ON else 1.0)
            _point(sweep, settings, concurrency, at, gpus, speed, vllm, dies=dies)
        _events(sweep, RUNS[settings], began, dies=settings is ON)
    record = _record(Point(Variant(BROKEN, "broken"), WORK, _load(4)), "INVALID", RUNS[BROKEN], None)
    why = Reason(check="start", text="error: this host has too little memory\n  likely cause: l1_size_gb is 4000")
    sweep.write(Point(Variant(BROKEN, "broken"), WORK, _load(4)), record.model_copy(update={"reasons": (why,)}))
    return folder


def realistic_result(
    concurrency: int, *, began: float, gpus: int = 2, faster: float = 1.0, vllm: str = "0.32.0", dies: bool = False
) -> BenchResult:
    """Of a single load."""
    measurements = [
        measurement(concurrency, repeat, began=began + repeat * _STEP, gpus=gpus, faster=faster, dies=dies)
        for repeat in range(REPEATS)
    ]
    versions: dict[str, str | None] = {
        "pdserve": "0.1.0",
        "git_revision": "a75b4b1f00d1",
        "python": "3.11.7",
        "kernel": "6.1.0-18-amd64",
        "vllm": vllm,
        "lmcache": "0.5.6",
        "mooncake": "0.3.13",
        "nixl": None,
        "pdserve (client)": "0.1.0 (0123456789abcdef)",
    }
    hardware = {
        "host": "node-1",
        "cpu": "AMD EPYC 9554 64-Core Processor",
        "cpus": "64",
        "memory_gib": "755",
        "platform": "cuda" if gpus else "cpu",
        "prefill-0": f"node node-1, devices {'0' if gpus else 'none'}",
        "decode-0": f"node node-1, devices {'1' if gpus else 'none'}",
    }
    if gpus:
        hardware["gpus"] = "0, NVIDIA H100 80GB HBM3, 81559 MiB, 570.86.15\n1, NVIDIA H100 80GB HBM3, 81559 MiB"
    about = Provenance(
        deployment="qwen3-8b",
        run_id="",
        began=began,
        client="vllm bench serve",
        tokenizer="Qwen/Qwen3-8B",
        versions=versions,
        hardware=hardware,
        recipe="schema: 1\nname: qwen3-8b\nplatform: cuda\nprefill:\n  instances: 1\ndecode:\n  instances: 1\n",
    )
    return BenchResult(provenance=about, workload=WORK, measurements=tuple(measurements))


def measurement(
    concurrency: int, repeat: int, *, began: float, gpus: int = 2, faster: float = 1.0, dies: bool = False
) -> Measurement:
    """Latencies that grow with the load, with noise of some per cent."""
    noise = random.Random(f"{concurrency} {repeat} {faster}")
    prefill, gap = 0.08 / faster, 0.006 * (1 + 0.05 * concurrency) / faster**0.3
    records = []
    for number in range(REQUESTS):
        waits = 0.02 * (concurrency - 1) * noise.uniform(0.9, 1.1)
        gaps = tuple(gap * noise.uniform(0.9, 1.15) for _ in range(OUTPUT - 1))
        ttft = (prefill + waits) * noise.uniform(0.97, 1.03)
        took = ttft + sum(gaps)
        records.append(
            RequestRecord(
                started=1000.0 + number // concurrency * took,
                ok=True,
                prompt_tokens=INPUT,
                output_tokens=OUTPUT,
                ttft=ttft,
                gaps=gaps,
                e2e=took,
            )
        )
    broken = dies and repeat == 1
    return Measurement(
        load=_load(concurrency),
        repeat=repeat,
        verdict=BenchVerdict(status="INVALID", reasons=(_DIED,)) if broken else BenchVerdict(status="VALID"),
        figures=figures(records, gpus=gpus, slo={}),
        window=_window(concurrency, prefill, gap),
        before=_reading(began),
        after=_reading(began + 0.8 * _STEP),
        raw="raw.json",
        log="log",
    )


def _window(concurrency: int, prefill: float, gap: float) -> Window:
    tokens = INPUT * REQUESTS
    return Window(
        prefill={
            "computed": 0.93 * tokens,
            "local_hits": 0.05 * tokens,
            "received": 0.02 * tokens,
            "queue_seconds": 0.012 * (concurrency - 1) * REQUESTS,
            "prefill_seconds": 0.8 * prefill * REQUESTS,
        },
        decode={"received": tokens, "computed": 0.0, "decode_seconds": 0.97 * gap * OUTPUT * REQUESTS},
        lmcache={"asked_tokens": float(tokens), "hit_tokens": 0.02 * tokens},
        proxy={"queue_seconds": 0.001 * REQUESTS, "transfer_seconds": 0.011 * REQUESTS},
    )


def _reading(at: float) -> Any:
    counts = Counts(values={"computed": 1.0})
    return reading(0.0, {}).model_copy(
        update={"clocks": Clocks(wall=at, monotonic=at, boot=at), "engines": {"prefill-0": counts}}
    )


def _load(concurrency: int) -> Load:
    return Load(requests=REQUESTS, concurrency=concurrency)


def _point(
    sweep: SweepFolder,
    settings: Settings,
    concurrency: int,
    began: float,
    gpus: int,
    faster: float,
    vllm: str,
    *,
    dies: bool,
) -> None:
    result = realistic_result(concurrency, began=began, gpus=gpus, faster=faster, vllm=vllm, dies=dies)
    run_id = RUNS[settings]
    measurements = tuple(
        each.model_copy(
            update={
                "before": each.before.model_copy(update={"run_id": run_id}),
                "after": each.after.model_copy(update={"run_id": run_id}),
            }
        )
        for each in result.measurements
    )
    recipe = result.provenance.recipe + "".join(f"{key}: {value}\n" for key, value in settings if "." not in key)
    about = result.provenance.model_copy(update={"run_id": run_id, "recipe": recipe})
    point = Point(Variant(settings, str(settings)), WORK, _load(concurrency))
    attempt = sweep.point(point) / "attempt"
    attempt.mkdir(parents=True)
    whole = result.model_copy(update={"provenance": about, "measurements": measurements})
    (attempt / RESULT).write_text(whole.model_dump_json())
    record = _record(point, "INVALID" if dies else "VALID", run_id, "attempt")
    sweep.write(point, record.model_copy(update={"reasons": (_DIED,) if dies else ()}))


def _record(point: Point, status: Literal["VALID", "INVALID"], run_id: str | None, result: str | None) -> PointRecord:
    return PointRecord(
        id=point.id,
        settings=point.deployment.settings,
        workload=WORK,
        load=point.load,
        status=status,
        result=result,
        run_id=run_id,
        seconds=200.0,
    )


def _events(sweep: SweepFolder, run_id: str, began: float, *, dies: bool) -> None:
    """The history of a start, to its end."""
    names = ("lmcache-0", "prefill-0", "decode-0", "proxy") if dies else ("prefill-0", "decode-0", "proxy")
    events: list[tuple[float, str, dict[str, Any]]] = []
    for number, name in enumerate(names):
        events.append((0.1 * number, "start", {"name": name, "node": "node-1"}))
        events.append((0.2 + 0.1 * number, "started", {"name": name, "node": "node-1", "pid": 100 + number}))
        events.append((4.0 + 6 * number, "ready", {"name": name, "seconds": 4.0}))
    events.append((25.0, "phase", {"phase": "ready"}))
    end = 30 + len(LOADS) * REPEATS * _STEP
    if dies:
        at = 30 + (3 * REPEATS + 1) * _STEP + 20
        how = {"pid": 102, "code": -9, "how": "was killed by SIGKILL", "seconds": at, "while_starting": False}
        events += [
            (at, "died", {"name": "decode-0", **how}),
            (at + 0.1, "phase", {"phase": "degraded"}),
            (at + 0.2, "restarting", {"name": "decode-0", "attempt": 1, "after_seconds": 2}),
            (at + 2.2, "start", {"name": "decode-0", "node": "node-1"}),
            (at + 28, "ready", {"name": "decode-0", "seconds": 25.8}),
            (at + 28.5, "phase", {"phase": "ready"}),
        ]
    events.append((end, "phase", {"phase": "draining"}))
    for number, name in enumerate(reversed(names)):
        events.append((end + number, "stop", {"name": name, "node": "node-1"}))
        events.append((end + number + 1, "stopped", {"name": name, "forced": False, "seconds": 1.0}))
    events.append((end + len(names) + 1, "down", {"phase": "stopped", "clean": True}))
    file = sweep.events(run_id)
    file.parent.mkdir(parents=True)
    file.write_text("".join(json.dumps({"at": began + at, "event": kind, **more}) + "\n" for at, kind, more in events))
