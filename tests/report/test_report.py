"""The report: verdicts at every row, provenance first, one file that loads nothing, no INVALID point in a curve."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdserve.bench.figures import figures
from pdserve.bench.result import Measurement, Window, read_result
from pdserve.bench.validity import Reason
from pdserve.bench.workload import TraceFacts
from pdserve.cli.compare import report as run
from pdserve.errors import PreflightError, StateError
from pdserve.report.page import against_load, bars_of, check_matplotlib, curves_of, front, pictures, report_page
from pdserve.report.rows import ReportRow, prompt_sources, read_report, stages
from pdserve.sweep.record import SweepFolder
from tests.bench.evidence import record
from tests.report.results import WINDOW, bench_folder, one, sweep_point
from tests.sweep.test_compare import INVALID
from tests.tables import each_row


def words(text: str) -> str:
    """What is read of a page."""
    return " ".join(re.sub(r"<[^>]+>", " ", text).split())


def tags(text: str) -> set[str]:
    return set(re.findall(r"<([a-z]\w*)", text))


def page(*folders: Path) -> str:
    return report_page(read_report(folders), [])


def column(text: str, index: int) -> list[str]:
    """Of the rows of figures that are measurements."""
    table = text[text.index('id="figures"') :].partition("</table>")[0]
    rows = [re.findall(r"<td\b[^>]*>(.*?)</td>", row, re.DOTALL) for row in table.split("<tr")]
    return [words(row[index]) for row in rows if len(row) > 3]


def test_each_row_has_its_verdict_and_its_reason(tmp_path: Path) -> None:
    text = page(bench_folder(tmp_path / "b", one(1), one(4, valid=False)))
    assert column(text, 0) == ["VALID", "INVALID"]
    assert column(text, 2) == ["concurrency 1", "concurrency 4"]
    assert "1 of 2 rows are INVALID" in words(text)
    assert "errors:" in words(text)


def test_a_point_that_is_invalid_or_never_started_is_a_row_that_does_not_count(
    tmp_path: Path,
) -> None:
    sweep = SweepFolder(tmp_path)
    sweep_point(sweep, (("c", "1"),), one(valid=False), "INVALID", *INVALID.reasons)
    sweep_point(sweep, (("c", "2"),), one())
    sweep_point(sweep, (("c", "3"),), None, "INVALID", Reason(check="start", text="no engine"))
    report = read_report([tmp_path])
    assert {(row.series, row.valid) for row in report.rows} == {("c=1", False), ("c=2", True), ("c=3", False)}
    said = words(report_page(report, []))
    assert all(text in said for text in ("errors:", "nothing was measured", "no engine"))


def test_provenance_comes_before_pictures_and_names_what_differs(tmp_path: Path) -> None:
    a = bench_folder(tmp_path / "a", one(), vllm="0.32.0", recipe="name: first\n")
    b = bench_folder(tmp_path / "b", one(), vllm="0.33.0", recipe="name: second\n")
    text = page(a, b)
    assert text.index("What was measured") < text.index("version of vllm") < text.index(">Pictures")
    assert "0.32.0 (A)" in words(text)
    assert "0.33.0 (B)" in words(text)
    assert "recipe: name" in text
    assert "name: first" in text
    assert "name: second" in text


def test_the_page_is_one_file_for_a_phone_in_light_and_dark_and_runs_nothing(tmp_path: Path) -> None:
    folder = bench_folder(tmp_path / "b", one(), recipe="name: <script>alert(1)</script>\n")
    report = read_report([folder])
    text = report_page(report, [replace(pictures(report)[0], note="n <b>")])
    assert "svg" in tags(text)
    assert not {"script", "link", "img", "iframe", "b"} & tags(text)
    assert not re.search(r"\s(src|href|on\w+)=", text)
    assert '<meta name="viewport" content="width=device-width, initial-scale=1"' in text
    assert "prefers-color-scheme: dark" in text


@each_row("window, shown", [
    (WINDOW, {"queue": 2.0, "prefill": 2.0, "transfer": 3.0, "decode": 4.0}),
    # vllm-router has none of our counters: a stage that nobody counts is missing, and not zero.
    (WINDOW.model_copy(update={"proxy": {}}), {"queue": 1.0, "prefill": 2.0, "decode": 4.0}),
    # An engine of prefill counts seconds of decode too, and nearly none.
    (
        WINDOW.model_copy(update={"prefill": {**WINDOW.prefill, "decode_seconds": 0.0}, "decode": {}}),
        {"queue": 2.0, "prefill": 2.0, "transfer": 3.0},
    ),
])  # fmt: skip
def test_stages_are_those_of_a_request(window: Window, shown: dict[str, float]) -> None:
    assert stages(one().model_copy(update={"window": window})) == shown


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="no sweep with points here") as refused:
        read_report([tmp_path / "nofolder"])
    assert "has printed" in str(refused.value.todo)


def test_without_matplotlib_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PreflightError) as raised:
        run([tmp_path], tmp_path / "r.html", None)
    assert "pip install 'pdserve[report]'" in raised.value.render()


def drawn(*folders: Path) -> dict[str, Any]:
    check_matplotlib()
    return {picture.name: picture for picture in pictures(read_report(folders))}


def ttft_axes(folder: Path) -> Any:
    """Of the picture of TTFT against load, alone."""
    check_matplotlib()
    report = read_report([folder])
    picture = against_load(report.rows, "ttft", report.names)
    assert picture is not None
    return picture.figure.axes[0]


def single_token() -> Measurement:
    """It has no ITL, thus two pictures less."""
    return one(4).model_copy(update={"figures": figures([record(output_tokens=1, gaps=())], gpus=2, slo={})})


def test_no_line_passes_through_an_invalid_point_and_it_is_a_cross_with_its_name(tmp_path: Path) -> None:
    folder = bench_folder(
        tmp_path / "b", one(1, ttft=0.1), one(4, ttft=0.2), one(8, ttft=9.0, valid=False), one(8, ttft=0.4)
    )
    axes = ttft_axes(folder)
    (line,) = axes.lines
    assert [tuple(map(round, point)) for point in line.get_xydata()] == [(1, 100), (4, 200), (8, 400)]
    labels = axes.get_legend_handles_labels()[1]
    assert "INVALID" in labels
    crosses = [tuple(map(round, offset)) for each in axes.collections for offset in each.get_offsets()]
    assert (8, 9000) in crosses


def test_pictures_take_the_ink_of_the_page_share_no_ids_and_draw_hostile_names(tmp_path: Path) -> None:
    sweep_point(SweepFolder(tmp_path), (("engine.env.X", "$a$ <script>"),), single_token())
    svgs = [picture.svg for picture in drawn(tmp_path).values()]
    text = "".join(svgs)
    assert "var(--ink)" in text
    assert "#010203" not in text
    assert "#000000" not in text
    assert "script" not in tags(text)
    ids = [name for svg in svgs for name in re.findall(r' id="([^"]+)"', svg)]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(ids)


def test_the_verb_writes_the_page_and_the_pictures(tmp_path: Path) -> None:
    folder = bench_folder(tmp_path / "b", single_token())
    run([folder], tmp_path / "r.html", tmp_path / "pictures")
    assert (tmp_path / "r.html").read_text().count("<svg") == 3
    assert {file.name for file in (tmp_path / "pictures").iterdir()} == {
        f"{name}.{kind}" for name in ("ttft", "sources", "stages") for kind in ("png", "svg")
    }


def test_a_bar_is_the_mean_of_the_valid_repeats_of_a_load_and_has_its_theory(tmp_path: Path) -> None:
    folder = bench_folder(tmp_path / "b", one(4), one(4), one(4, valid=False), one(8))
    report = read_report([folder])
    bars = bars_of(report, prompt_sources, lambda _: 0.0)
    assert [(bar.label, bar.valid, bar.mark) for bar in bars] == [
        ("concurrency 4", True, 0.0),
        ("concurrency 4\nINVALID #1", False, 0.0),
        ("concurrency 8", True, 0.0),
    ]


def test_hits_are_held_against_what_a_trace_repeats_itself(tmp_path: Path) -> None:
    folder = bench_folder(tmp_path / "b", one(4))
    facts = TraceFacts(
        name="t", digest="d", format="mooncake", sessions=1, requests=20, prefix_hit=0.4, estimated=False
    )
    result = read_result(folder, str(folder)).model_copy(update={"trace": facts})
    (folder / "result.json").write_text(result.model_dump_json())
    (row,) = read_report([folder]).rows
    assert row.theory == pytest.approx(40)
    assert column(page(folder), 10) == ["10 %, 40 %"]
    assert "Random prompts" not in drawn(folder)["sources"].note


def ttft_means(*folders: Path) -> dict[str, list[float]]:
    """Of each series, the means that its line goes through."""

    def ttft(_: ReportRow, each: Measurement) -> float | None:
        return each.figures.ttft.p50 if each.figures.ttft is not None else None

    curves = curves_of(read_report(folders).rows, lambda row, _: float(row.load.concurrency or 0), ttft)
    return {series: [round(spot[1]) for spot in curve.means.values()] for series, curve in curves.items()}


def test_points_of_an_earlier_recipe_are_a_curve_of_their_own(tmp_path: Path) -> None:
    sweep = SweepFolder(tmp_path / "s")
    for size in ("1", "4"):
        sweep_point(sweep, (("l1", size),), one(ttft=0.1), recipe="name: d\nx: 1\n")
        sweep_point(sweep, (("l1", size),), one(ttft=0.5), recipe="name: d\nx: 2\n")
    means = ttft_means(sweep.path)
    assert sorted(means.values()) == [[100], [100], [500], [500]]
    assert all(re.fullmatch(r"l1=[14]; recipe [0-9a-f]{8}", series) for series in means)
    report = read_report([sweep.path])
    assert {series for series, _ in report.provenance} == set(means)
    bars = bars_of(report, prompt_sources, lambda _: None)
    assert [bar.label for bar in bars] == [f"{letter}: concurrency 4" for letter in "ABCD"]


def test_the_same_sweep_in_two_folders_is_two_curves(tmp_path: Path) -> None:
    folders = []
    for version, ttft in (("v032", 0.1), ("v033", 0.5)):
        sweep = SweepFolder(tmp_path / version / "cache")
        sweep_point(sweep, (("l1", "1"),), one(ttft=ttft))
        folders.append(sweep.path)
    assert ttft_means(*folders) == {"l1=1; v032/cache": [100], "l1=1; v033/cache": [500]}


def test_the_front_is_what_no_other_point_beats_in_both() -> None:
    assert front([(1.0, 9.0), (2.0, 5.0), (1.5, 5.0), (3.0, 1.0), (2.5, 0.5)]) == [(1.0, 9.0), (2.0, 5.0), (3.0, 1.0)]
    assert front([]) == []


def test_tasks_of_a_slurm_array_have_names_of_their_own_and_the_same_recipe(tmp_path: Path) -> None:
    """Half of the points were measured here, the other half by a task."""
    sweep = SweepFolder(tmp_path / "s")
    for concurrency, name in ((1, "d"), (4, "d-0a1b2c")):
        recipe = f"name: {name}\nx: 1\n"
        sweep_point(sweep, (("l1", "1"),), one(concurrency), recipe=recipe, concurrency=concurrency)
    assert ttft_means(sweep.path) == {"l1=1": [100, 100]}
