"""Proof of life: what the records of an engine's processes prove, and what they say to Prometheus."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from pdserve.patches.record import EffectsCollector, PatchRecord, read_records, shortcomings
from tests.tables import each_row

REQUIRED = "multiconnector-prom-metrics"
WHOLE = ("api-server", "engine-core", "worker")


def record(kind: str, active: tuple[str, ...] = (REQUIRED,), **more: Any) -> PatchRecord:
    return PatchRecord(pid=7, session=os.getsid(0), process=kind, kind=kind, active=active, **more)


def problems(*records: PatchRecord, workers: int = 1, cores: int = 1) -> list[str]:
    return shortcomings(records, [REQUIRED], workers=workers, cores=cores)


def test_an_engine_is_proven_when_each_of_its_processes_has_reported() -> None:
    """A single worker may live in its EngineCore. Without patches there is nothing to prove."""
    assert problems(*map(record, WHOLE)) == problems(*map(record, WHOLE[:2])) == []
    assert shortcomings([], [], workers=8, cores=2) == []


@each_row("kind", ["api-server", "engine-core"])
def test_a_process_without_a_record_is_missed(kind: str) -> None:
    (problem,) = problems(*(record(process_kind) for process_kind in WHOLE if process_kind != kind))
    assert problem == f"1 {kind} process(es) must report their patches, 0 did"


def test_every_worker_of_several_and_every_dp_rank_must_report() -> None:
    assert problems(*map(record, WHOLE), workers=2, cores=2) == [
        "2 engine-core process(es) must report their patches, 1 did",
        "2 worker process(es) must report their patches, 1 did",
    ]


@each_row("kind", WHOLE)
def test_a_process_without_a_required_patch_is_named(kind: str) -> None:
    records = [record(process_kind, () if process_kind == kind else (REQUIRED,)) for process_kind in WHOLE]
    assert problems(*records) == [f"{kind} (pid 7) runs without {REQUIRED}"]


def test_a_patch_that_the_code_does_not_need_is_not_missed() -> None:
    assert problems(*(record(kind, (), not_needed={REQUIRED: "upstream has it"}) for kind in WHOLE)) == []


def test_a_patch_that_unknown_code_does_without_is_not_missed_where_traffic_is_served() -> None:
    records = [record(kind, (), skipped={"mooncake-pulls": "unknown", REQUIRED: "unknown"}) for kind in WHOLE]
    assert shortcomings(records, ["mooncake-pulls"], workers=1, cores=1) == []
    assert len(shortcomings(records, [REQUIRED], workers=1, cores=1)) == len(WHOLE)
    silent = [record(kind, ()) for kind in WHOLE]
    assert len(shortcomings(silent, ["mooncake-pulls"], workers=1, cores=1)) == len(WHOLE)


def test_half_a_record_and_that_of_a_process_that_does_not_serve_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "0.json").write_text(record("other", ()).model_dump_json())
    (tmp_path / "1.json").write_text("{")
    (tmp_path / "2.json").write_text('{"pid": 2}')
    (tmp_path / "3.json").write_text(record("worker").model_dump_json())
    assert [record.kind for record in read_records(tmp_path)] == ["worker"]
    assert read_records(tmp_path / "gone") == []


def test_the_api_server_shows_the_effects_of_all_processes_of_its_engine(tmp_path: Path) -> None:
    effects = {REQUIRED: {"observations-dropped": 2}}
    for number, (kind, session) in enumerate([("api-server", 5), ("engine-core", 5), ("worker", 6)]):
        patch_record = record(kind, effects=effects).model_copy(update={"session": session})
        (tmp_path / f"{number}.json").write_text(patch_record.model_dump_json())
    registry = CollectorRegistry()
    registry.register(EffectsCollector(tmp_path, session=5))
    text = generate_latest(registry).decode()
    assert f'pdserve_patch_effects_total{{effect="observations-dropped",patch="{REQUIRED}"}} 4.0' in text
    assert f'pdserve_patch_active_processes{{patch="{REQUIRED}"}} 2.0' in text
