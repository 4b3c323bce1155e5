"""The result of a point, given without its sweep: what the sweep objects to counts all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.bench.result import Measurement
from pdserve.bench.validity import Reason
from pdserve.cli.compare import run_compare as run
from pdserve.errors import StateError
from pdserve.report.rows import read_report
from pdserve.sweep.record import POINT, SweepFolder
from tests.report.results import bench_folder, one, sweep_point
from tests.tables import each_row

WARM = Reason(check="cold-cache", text="it was warm")
FEW = Reason(check="repeats", text="2 of 3 repeats were made")


def attempt(sweep: Path, measurement: Measurement, *reasons: Reason) -> Path:
    """The folder of the result of the only point of a sweep."""
    sweep_point(SweepFolder(sweep), (("c", "1"),), measurement, "INVALID" if reasons else "VALID", *reasons)
    (found,) = sweep.glob("points/*/attempt")
    return found


def compared(a: Path, b: Path, capsys: pytest.CaptureFixture[str], page: Path | None = None) -> str:
    run(str(a), str(b), as_json=False, page=page)
    return " ".join(capsys.readouterr().out.split())


@each_row("reason", [WARM, FEW])
def test_a_report_of_an_attempt_has_the_verdict_of_its_point(reason: Reason, tmp_path: Path) -> None:
    (row,) = read_report([attempt(tmp_path, one(), reason)]).rows
    assert row.status == "INVALID"
    assert row.reasons == (reason,)


def test_an_attempt_of_a_valid_point_is_valid(tmp_path: Path) -> None:
    (row,) = read_report([attempt(tmp_path, one())]).rows
    assert row.status == "VALID"


def test_an_attempt_that_its_point_does_not_name_has_its_own_verdict(tmp_path: Path) -> None:
    """`--retry` has measured the point again."""
    newest = attempt(tmp_path, one(), WARM)
    (row,) = read_report([newest.rename(newest.with_name("former"))]).rows
    assert row.status == "VALID"


def test_a_point_that_cannot_be_read_is_an_error_and_no_verdict(tmp_path: Path) -> None:
    folder = attempt(tmp_path, one(), WARM)
    (folder.parent / POINT).write_text("{")
    with pytest.raises(StateError, match=r"this point\.json is damaged"):
        read_report([folder])


def test_an_attempt_of_a_point_on_warm_caches_is_not_compared_and_that_is_said(
    tmp_path: Path, pdserve_home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    warm, good = attempt(tmp_path / "s", one(), WARM), bench_folder(tmp_path / "b", one())
    page = tmp_path / "page.html"
    for which in (warm, warm / "result.json"):
        said = compared(which, good, capsys, page)
        assert "not compared: concurrency 4, 20 requests: 1 of 1 repeats of A are INVALID (cold-cache)" in said
        assert "TTFT mean" not in said
        assert "1 of 2 measurements are INVALID" in " ".join(page.read_text().split())
    monkeypatch.chdir(warm)
    assert "INVALID (cold-cache)" in compared(good, Path(), capsys)


def test_lacking_repeats_are_said(tmp_path: Path, pdserve_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As in two sweeps: only repeats that are INVALID by themselves are left out."""
    said = compared(bench_folder(tmp_path / "b", one()), attempt(tmp_path / "s", one(), FEW), capsys)
    assert "not compared: B lacks repeats, by which its point is INVALID (repeats): 2 of 3 repeats were made" in said
    assert "TTFT mean" in said


def test_a_sweep_and_a_result_are_not_compared(tmp_path: Path, pdserve_home: Path) -> None:
    folder = attempt(tmp_path, one())
    with pytest.raises(StateError) as refused:
        run(str(tmp_path), str(folder), as_json=False)
    way = str(refused.value.todo).rpartition(" ")[2]
    assert way == "points/POINT/ATTEMPT/"
    assert folder == tmp_path / way.replace("POINT", folder.parent.name).replace("ATTEMPT", folder.name)
