"""The causes in runs of real deployments: what has to be found is, and nothing else."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter

from pdserve.doctor.read_run import read_logs, read_run
from pdserve.doctor.records import Diagnosis, LiveFigures
from pdserve.doctor.rules import diagnose
from pdserve.run.directory import RunDir
from tests.doctor.recorded_runs import RECORDED, RUNS, RecordedRun
from tests.tables import each_row

LIVE = TypeAdapter(LiveFigures)


def said_of(recorded: RecordedRun, folder: Path) -> list[Diagnosis]:
    """The folder's name is a run's, so that nothing is written into the repository."""
    copy = folder / "20261125-000000-000000"
    shutil.copytree(RUNS / recorded.name, copy)
    records = read_run(RunDir(copy))
    assert not records.unread
    if recorded.alive:
        live = LIVE.validate_json((copy / "live.json").read_bytes())
        records = replace(records, live=live, alive=True, phase="ready")
    return diagnose(records, read_logs(RunDir(copy), records))


@each_row("recorded", RECORDED)
def test_what_is_said_of_a_recorded_run(recorded: RecordedRun, tmp_path: Path) -> None:
    said = said_of(recorded, tmp_path)
    assert {(each.rule, process) for each in said for process in each.processes or ("",)} == recorded.said
    assert any(recorded.words in each.cause for each in said) or not recorded.words, [each.cause for each in said]


def test_every_recorded_run_has_its_expectation_and_its_row_in_the_document() -> None:
    folders = {path.name for path in RUNS.iterdir()}
    assert folders == {each.name for each in RECORDED}


@each_row("place", ["/root/", "/home/", "/tmp/p"])
def test_no_recorded_run_names_a_place_of_its_machine(place: str) -> None:
    files = [path for path in RUNS.rglob("*") if path.is_file()]
    assert [path.name for path in files if place in path.read_text()] == []
