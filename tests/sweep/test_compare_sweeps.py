"""Two sweeps beside each other: points matched by what they set, what differs first, no noise called real."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pdserve.bench.validity import Reason
from pdserve.bench.workload import Load
from pdserve.cli.compare import compare as run
from pdserve.errors import StateError
from pdserve.sweep.compare import MeasuredPoint, compare_sweeps, read_sweep
from pdserve.sweep.file import Settings
from pdserve.sweep.record import PointRecord, SweepFolder
from tests.report import results
from tests.report.results import realistic_sweep, sweep_point
from tests.sweep.test_compare import INVALID, measured, result


def point(
    *ttfts: float, settings: Settings = (), concurrency: int = 4, recipe: str = "name: d\n", written: float = 0.0
) -> MeasuredPoint:
    found = result(*(measured(ttft) for ttft in ttfts), recipe=recipe)
    load = Load(requests=20, concurrency=concurrency)
    record = PointRecord(
        id="p", settings=settings, workload=found.workload, load=load, status="VALID", result="r", seconds=1.0
    )
    return MeasuredPoint(record, found, written)


def test_points_are_matched_by_the_keys_that_vary_and_the_others_are_named_as_different() -> None:
    """The version that was swept constantly in A is not there in B: the points are the same all the same."""
    a = [point(0.1, 0.11, settings=(("x", str(x)), ("v", "1")), recipe=f"name: d\nx: {x}\nv: 1\n") for x in (1, 2)]
    b = [point(0.1, 0.11, settings=(("x", str(x)),), recipe=f"name: d\nx: {x}\nv: 9\n") for x in (2, 3)]
    compared = compare_sweeps(a, b)
    assert [(point.letter, point.title.split(";")[0]) for point in compared.points] == [("A", "x=2")]
    (only,) = compared.differences
    assert (only.what, only.a, only.b) == ("recipe: v", "1", "9")
    assert only.points == ("A",)
    assert [line.split(": ")[-1] for line in compared.left_out] == ["B has no such point", "A has no such point"]


def test_of_points_of_an_earlier_recipe_the_newest_counts_and_that_is_said() -> None:
    a = [point(9.0, 9.1, written=1.0), point(0.1, 0.11, written=2.0)]
    compared = compare_sweeps(a, [point(0.1, 0.11)])
    (only,) = compared.points
    assert next(change.a for change in only.changes if change.figure == "TTFT mean") == pytest.approx(105.0)
    assert "A has it several times" in compared.left_out[0]


def test_a_point_that_does_not_count_is_not_compared() -> None:
    good = point(0.1, 0.11)
    record = good.record.model_copy(update={"status": "INVALID", "reasons": INVALID.reasons, "result": None})
    absent = MeasuredPoint(record, None)
    assert "B was not measured (errors)" in compare_sweeps([good], [absent]).left_out[0]
    wrong = MeasuredPoint(good.record, result(measured(0.1, INVALID)))
    compared = compare_sweeps([wrong], [good])
    assert compared.points == ()
    assert "1 of 1 repeats of A are INVALID (errors)" in compared.left_out[0]


def test_two_folders_are_compared_on_the_terminal_and_as_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "LOADS", (1, 16))
    a = realistic_sweep(tmp_path / "a")
    b = realistic_sweep(tmp_path / "b", faster=1.3, vllm="0.33.0")
    page = tmp_path / "page.html"
    run(str(a), str(b), html=page)
    said = capsys.readouterr().out
    assert said.index("version of vllm") < said.index("not compared: ") < said.index("TTFT mean")
    assert "A was not measured (start); B was not measured (start)" in said
    assert re.search(r"B is better in [1-9]\d* and worse in", said)
    text = re.sub(r"\s+", " ", page.read_text())
    assert (
        text.index("What differs") < text.index("0.33.0") < text.index("not compared") < text.index("points that both")
    )
    assert len(read_sweep(a)) == 5
    assert text.count('id="point-') == 4


def test_a_sweep_and_a_benchmark_are_not_compared(tmp_path: Path, pdserve_home: Path) -> None:
    sweep_point(sweep := SweepFolder(tmp_path / "a"), (("c", "1"),), None, "INVALID", Reason(check="start", text="no"))
    (tmp_path / "result.json").write_text(result(measured(0.1)).model_dump_json())
    with pytest.raises(StateError, match="is a sweep, and"):
        run(str(sweep.path), str(tmp_path / "result.json"))
    (tmp_path / "empty" / "points").mkdir(parents=True)
    with pytest.raises(StateError, match="no sweep with points"):
        run(str(sweep.path), str(tmp_path / "empty"))
