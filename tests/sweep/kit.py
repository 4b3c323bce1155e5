"""Sweeps over one small recipe: planned only, and measured over fake engines."""

from __future__ import annotations

from pathlib import Path

import yaml

from pdserve.sweep.file import PlannedSweep, Point, load_sweep, resolve
from pdserve.sweep.record import PointRecord, SweepFolder, records_in
from tests.launch.deployment import recipe

RECIPE = """\
schema: 1
name: small
platform: cuda
devices_per_node: 8
model: {id: org/small, served_name: small}
engine: {args: {max-model-len: 1024}}
prefill: {instances: 1}
decode: {instances: 1}
"""
SWEEP = """\
schema: 1
name: load
recipe: r.yaml
workload: [{input_tokens: 8, output_tokens: 4}]
concurrency: [1, 4]
"""
CROSS = "cross:\n  decode.instances: [1, 2]\n"
WORK = {"input_tokens": 300, "output_tokens": 2, "repeats": 1, "warmup": 0}


def planned(folder: Path, cross: str = CROSS, text: str = RECIPE) -> PlannedSweep:
    (folder / "r.yaml").write_text(text)
    (folder / "s.yaml").write_text(SWEEP + cross)
    return resolve(load_sweep(folder / "s.yaml"), {})


def record(point: Point, seconds: float, start: float | None = None, result: str | None = "r") -> PointRecord:
    return PointRecord(
        id=point.id,
        settings=point.deployment.settings,
        workload=point.workload,
        load=point.load,
        status="VALID",
        result=result,
        start_seconds=start,
        seconds=seconds,
    )


def sweep_file(folder: Path, **changes: object) -> Path:
    """Over a recipe without LMCache, whose fakes start fast."""
    base = recipe(
        folder,
        lmcache=None,
        prefill__connector={"kind": "mooncake", "protocol": "tcp"},
        engine__cache_reset_endpoint=True,  # or each point would be a start
    )
    document = {
        "schema": 1,
        "name": "s",
        "recipe": base.name,
        "workload": [WORK],
        "concurrency": [1, 2],
        "requests": 4,
        **changes,
    }
    file = folder / "sweep.yaml"
    file.write_text(yaml.safe_dump(document, sort_keys=False))
    return file


def measured(home: Path) -> SweepFolder:
    """The folder of the sweep that `sweep_file` has written."""
    return SweepFolder.of(home, "fake", "s")


def records(home: Path) -> list[PointRecord]:
    every = records_in(measured(home).path).values()
    return sorted(every, key=lambda record: (record.settings, record.load.concurrency or 0))


def starts(home: Path) -> int:
    return len(list(measured(home).starts.iterdir()))
