"""The report: verdicts at every row, provenance first, one file that loads nothing, no INVALID point in a curve."""

from __future__ import annotations

import builtins
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from pdserve.bench.figures import figures
from pdserve.bench.result import Measurement, Window, read_result
from pdserve.bench.traces import TraceFacts
from pdserve.bench.validity import Reason
from pdserve.cli.compare import run_report as run
from pdserve.errors import PreflightError, StateError
from pdserve.report.page import report_page
from pdserve.report.pictures import against_load, bars_of, check_matplotlib, curves_of, front, pictures
from pdserve.report.rows import ReportRow, prompt_sources, read_report, stages
from pdserve.sweep.record import SweepFolder
from tests.bench.evidence import reading, record
from tests.report.results import WINDOW, bench_folder, one, sweep_point


class Parsed(HTMLParser):
    """Tags with their attributes, the rows of the table of figures, and all text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self._in_figures = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "table":
            self._in_figures = dict(attrs).get("id") == "figures"
        if tag == "tr" and self._in_figures:
            self.rows.append([])
        if tag == "td" and self._in_figures:
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self._in_figures and self.rows and self.rows[-1]:
            self.rows[-1][-1] += data

    def column(self, index: int) -> list[str]:
        """Of the rows that are measurements."""
        return [row[index].strip() for row in self.rows if len(row) > 3]


def parsed(*folders: Path) -> Parsed:
    return Parsed(report_page(read_report(folders), []))


def test_each_row_has_its_verdict_and_its_reason(tmp_path: Path) -> None:
    shown = parsed(bench_folder(tmp_path / "b", one(1), one(4, valid=False)))
    assert shown.column(0) == ["VALID", "INVALID"]
    assert shown.column(2) == ["concurrency 1", "concurrency 4"]
    assert "1 of 2 rows are INVALID" in " ".join(shown.texts)
    assert any("errors:" in text for text in shown.texts)


def test_each_row_has_the_kv_that_was_moved(tmp_path: Path) -> None:
    unknown = one(4).model_copy(update={"window": Window()})
    shown = parsed(bench_folder(tmp_path / "b", one(1), unknown))
    assert shown.column(12) == ["2.5 / 0.25", "- / -"]


def test_a_point_that_is_invalid_makes_its_valid_measurement_invalid(tmp_path: Path) -> None:
    sweep = SweepFolder(tmp_path)
    sweep_point(sweep, (("c", "1"),), one(), "INVALID", Reason(check="cold-cache", text="it was warm"))
    sweep_point(sweep, (("c", "2"),), one())
    report = read_report([tmp_path])
    assert {(row.series, row.valid) for row in report.rows} == {("c=1", False), ("c=2", True)}
    assert "it was warm" in "".join(Parsed(report_page(report, [])).texts)


def test_a_point_that_never_started_is_a_row_without_figures(tmp_path: Path) -> None:
    sweep_point(SweepFolder(tmp_path), (("c", "1"),), None, "INVALID", Reason(check="start", text="no engine"))
    shown = parsed(tmp_path)
    texts = " ".join(shown.texts)
    assert "nothing was measured" in texts
    assert "no engine" in texts
    assert shown.column(0) == ["INVALID"]


def test_provenance_comes_before_pictures_and_names_what_differs(tmp_path: Path) -> None:
    a = bench_folder(tmp_path / "a", one(), vllm="0.32.0", recipe="name: first\n")
    b = bench_folder(tmp_path / "b", one(), vllm="0.33.0", recipe="name: second\n")
    text = report_page(read_report([a, b]), [])
    shown = " ".join(Parsed(text).texts)
    assert text.index("What was measured") < text.index("version of vllm") < text.index(">Pictures")
    assert "0.32.0 (A)" in re.sub(r"\s+", " ", shown)
    assert "0.33.0 (B)" in re.sub(r"\s+", " ", shown)
    assert "recipe: name" in text
    assert "name: first" in text
    assert "name: second" in text


def test_points_of_a_sweep_under_other_circumstances_are_named_as_that(tmp_path: Path) -> None:
    first, other = (bench_folder(tmp_path / vllm, one(), vllm=vllm) for vllm in ("0.31.0", "0.32.0"))
    said = "Not all were measured under the same circumstances. Different: vllm."
    assert said in "".join(parsed(first, other).texts)
    assert said not in "".join(parsed(first, bench_folder(tmp_path / "x", one(8), vllm="0.31.0")).texts)


def test_the_page_is_one_file_for_a_phone_in_light_and_dark_and_runs_nothing(tmp_path: Path) -> None:
    folder = bench_folder(tmp_path / "b", one(), recipe="name: <script>alert(1)</script>\n")
    report = read_report([folder])
    text = report_page(report, [replace(pictures(report)[0], note="n <b>")])
    shown = Parsed(text)
    names = [tag for tag, _ in shown.tags]
    assert "svg" in names
    assert not {"script", "link", "img", "iframe", "b"} & set(names)
    assert not [attrs for _, attrs in shown.tags if attrs.keys() & {"src", "href", "onclick", "onload"}]
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in shown.tags
    assert "prefers-color-scheme: dark" in text


def test_stages_are_a_request_and_sources_are_shares() -> None:
    # One request completed.
    assert stages(one()) == {"queue": 2.0, "prefill": 2.0, "transfer": 3.0, "decode": 4.0}
    assert prompt_sources(one()) == {"computed": 90.0, "engine's own cache": 10.0, "cache tier": 0.0}


def test_a_stage_that_nobody_counts_is_missing_and_not_zero() -> None:
    """vllm-router has none of our counters."""
    some = one().model_copy(update={"window": WINDOW.model_copy(update={"proxy": {}})})
    assert stages(some) == {"queue": 1.0, "prefill": 2.0, "decode": 4.0}
    assert prompt_sources(one().model_copy(update={"window": Window()})) == {}


def test_decode_that_could_not_be_read_is_missing_and_not_what_prefill_counts() -> None:
    """An engine of prefill counts seconds of decode too, and nearly none."""
    prefill = {**WINDOW.prefill, "decode_seconds": 0.0}
    unread = one().model_copy(update={"window": WINDOW.model_copy(update={"prefill": prefill, "decode": {}})})
    assert stages(unread) == {"queue": 2.0, "prefill": 2.0, "transfer": 3.0}


def test_one_engine_that_does_both_has_its_decode_among_its_own_counts() -> None:
    window = Window(prefill={"prefill_seconds": 2.0, "decode_seconds": 4.0})
    before = reading(0.0, {"aggregated-0": {}})
    both = one().model_copy(update={"window": window, "before": before})
    assert stages(both) == {"prefill": 2.0, "decode": 4.0}


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="neither a sweep nor a benchmark"):
        read_report([tmp_path])


def test_a_folder_that_is_not_there_and_a_file_are_told_apart_from_one_without_results(tmp_path: Path) -> None:
    with pytest.raises(StateError) as absent:
        read_report([tmp_path / "nofolder"])
    assert absent.value.render().startswith(f"{tmp_path}/nofolder: this folder does not exist\n")
    assert "correct the path" in str(absent.value.todo)
    assert "result.json" not in absent.value.render()
    (tmp_path / "result.json").write_text("{}")
    with pytest.raises(StateError) as file:
        read_report([tmp_path / "result.json"])
    assert file.value.what == "this is a file, not a folder"
    assert file.value.todo == f"give the folder that it is in: {tmp_path}"


def test_without_matplotlib_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name == "matplotlib":
            raise ModuleNotFoundError("No module named 'matplotlib'", name=name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
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


def test_no_two_of_64_series_look_alike(tmp_path: Path) -> None:
    """There are eight colours and eight marks."""
    sweep = SweepFolder(tmp_path)
    for number in range(64):
        sweep_point(sweep, (("c", str(number)),), one())
    marks = ttft_axes(tmp_path).collections
    looks = [(tuple(each.get_facecolor()[0]), each.get_paths()[0].vertices.tobytes()) for each in marks]
    assert len(looks) == len(set(looks)) == 64


def test_a_curve_of_invalid_points_alone_has_no_line(tmp_path: Path) -> None:
    made = drawn(bench_folder(tmp_path / "b", one(1, valid=False), one(4, valid=False)))
    for name in ("throughput", "ttft", "itl"):
        assert not made[name].figure.axes[0].lines
    for picture in made.values():
        assert "2 of 2 measurements INVALID" in picture.figure.axes[0].get_title()


def test_pictures_take_the_ink_of_the_page_share_no_ids_and_draw_hostile_names(tmp_path: Path) -> None:
    sweep_point(SweepFolder(tmp_path), (("engine.env.X", "$a$ <script>"),), single_token())
    svgs = [picture.svg for picture in drawn(tmp_path).values()]
    text = "".join(svgs)
    assert "var(--ink)" in text
    assert "#010203" not in text
    assert "#000000" not in text
    assert not [tag for tag, _ in Parsed(text).tags if tag == "script"]
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


def test_a_picture_counts_what_it_cannot_draw(tmp_path: Path) -> None:
    sweep = SweepFolder(tmp_path)
    sweep_point(sweep, (("c", "1"),), one())
    sweep_point(sweep, (("c", "2"),), None, "INVALID", Reason(check="start", text="no engine"))
    assert "1 of 2 measurements INVALID (1 not drawn)" in ttft_axes(tmp_path).get_title()


def test_answers_of_a_single_token_have_no_itl_and_are_drawn_all_the_same(tmp_path: Path) -> None:
    folder = bench_folder(tmp_path / "b", single_token())
    assert set(drawn(folder)) == {"ttft", "sources", "stages"}
    assert parsed(folder).column(6) == ["-"]


def test_what_completed_nothing_leaves_no_picture(tmp_path: Path) -> None:
    nothing = one(4, valid=False).model_copy(update={"figures": figures([record(ok=False)], gpus=2, slo={})})
    folder = bench_folder(tmp_path / "b", nothing)
    assert drawn(folder) == {}
    assert "There is no measurement to draw" in " ".join(parsed(folder).texts)


def test_what_lmcache_had_is_not_called_a_hit_for_it_may_not_have_been_loaded(tmp_path: Path) -> None:
    texts = parsed(bench_folder(tmp_path / "b", one())).texts
    assert "LMCache had" in texts
    assert "LMCache hit" not in "".join(texts)


def test_a_bar_is_the_mean_of_the_valid_repeats_of_a_load_and_has_its_theory(tmp_path: Path) -> None:
    folder = bench_folder(tmp_path / "b", one(4), one(4), one(4, valid=False), one(8))
    report = read_report([folder])
    bars = bars_of(report.rows, report.names, prompt_sources, lambda _: 0.0)
    assert [(bar.text, bar.valid, bar.mark) for bar in bars] == [
        ("concurrency 4, 2 repeats", True, 0.0),
        ("concurrency 4, repeat 1", False, 0.0),
        ("concurrency 8, 1 repeat", True, 0.0),
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
    assert parsed(folder).column(10) == ["10 %, 40 %"]
    assert "Random prompts" not in drawn(folder)["sources"].note


def test_the_front_is_what_no_other_point_beats_in_both() -> None:
    assert front([(1.0, 9.0), (2.0, 5.0), (1.5, 5.0), (3.0, 1.0), (2.5, 0.5)]) == [(1.0, 9.0), (2.0, 5.0), (3.0, 1.0)]
    assert front([]) == []


def test_what_a_sweep_adds_is_told_from_what_a_repeat_has(swept: Path) -> None:
    """Of three repeats of a point one died with the engine."""
    report = read_report([swept])
    of_point = [row for row in report.rows if not row.valid and row.measurement is not None]
    assert [[reason.check for reason in row.reasons] for row in of_point] == [["point"], ["processes"], ["point"]]


def test_series_are_in_the_order_of_their_runs_and_have_a_letter(swept: Path) -> None:
    report = read_report([swept])
    assert [report.letter(series) for series in report.names] == ["A", "B", "C"]
    assert "lmcache=null" in next(iter(report.names))
    assert "4000" in list(report.names)[-1]


def test_curves_of_different_prompts_are_different_and_provenance_names_them(tmp_path: Path) -> None:
    sweep = SweepFolder(tmp_path)
    sweep_point(sweep, (("c", "1"),), one())
    longer = bench_folder(tmp_path / "other", one())
    text = (longer / "result.json").read_text().replace('"input_tokens":10,', '"input_tokens":20,', 1)
    (longer / "result.json").write_text(text)
    report = read_report([tmp_path, longer])
    assert list(report.names) == ["10 in, 5 out; c=1", "20 in, 5 out; d other"]
    assert {series for series, _ in report.provenance} == set(report.names)


def test_what_is_the_same_at_all_points_is_no_part_of_a_name(tmp_path: Path) -> None:
    sweep = SweepFolder(tmp_path)
    sweep_point(sweep, (("lmcache", "null"), ("blocks", "96")), one())
    sweep_point(sweep, (("lmcache", "on"), ("blocks", "96")), one())
    assert {row.series for row in read_report([tmp_path]).rows} == {"lmcache=null", "lmcache=on"}


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
    bars = bars_of(report.rows, report.names, prompt_sources, lambda _: None)
    assert [bar.text for bar in bars] == ["concurrency 4, 1 repeat"] * 4


def test_so_are_they_where_the_loads_were_changed_with_the_recipe(tmp_path: Path) -> None:
    sweep = SweepFolder(tmp_path / "s")
    for number, concurrency in enumerate((1, 4, 8, 16)):
        recipe = f"name: d\nx: {number // 2}\n"
        some = one(concurrency, ttft=0.1 * (number + 1))
        sweep_point(sweep, (("l1", "1"),), some, recipe=recipe, concurrency=concurrency)
    means = ttft_means(sweep.path)
    assert sorted(means.values()) == [[100, 200], [300, 400]]
    assert all(re.fullmatch(r"l1=1; recipe [0-9a-f]{8}", series) for series in means)


def test_tasks_of_a_slurm_array_have_names_of_their_own_and_the_same_recipe(tmp_path: Path) -> None:
    """Half of the points were measured here, the other half by a task."""
    sweep = SweepFolder(tmp_path / "s")
    for concurrency, name in ((1, "d"), (4, "d-0a1b2c")):
        recipe = f"name: {name}\nx: 1\n"
        sweep_point(sweep, (("l1", "1"),), one(concurrency), recipe=recipe, concurrency=concurrency)
    assert ttft_means(sweep.path) == {"l1=1": [100, 100]}


def test_recipes_are_told_apart_over_folders(tmp_path: Path) -> None:
    edited = SweepFolder(tmp_path / "a" / "s")
    for concurrency in (1, 4):
        some = one(concurrency, ttft=0.1 * concurrency)
        sweep_point(edited, (("l1", "1"),), some, recipe=f"x: {concurrency}\n", concurrency=concurrency)
    other = SweepFolder(tmp_path / "b" / "s")
    sweep_point(other, (("l1", "1"),), one(8, ttft=0.8), recipe="x: 4\n", concurrency=8)
    assert sorted(ttft_means(edited.path, other.path).values()) == [[100], [400], [800]]


def test_the_same_sweep_in_two_folders_is_two_curves(tmp_path: Path) -> None:
    folders = []
    for version, ttft in (("v032", 0.1), ("v033", 0.5)):
        sweep = SweepFolder(tmp_path / version / "cache")
        sweep_point(sweep, (("l1", "1"),), one(ttft=ttft))
        folders.append(sweep.path)
    assert ttft_means(*folders) == {"l1=1; v032/cache": [100], "l1=1; v033/cache": [500]}


def test_folders_of_different_loads_are_one_curve(tmp_path: Path) -> None:
    """A sweep that was carried on somewhere else."""
    here = bench_folder(tmp_path / "a" / "b", one(1, ttft=0.1))
    there = bench_folder(tmp_path / "c" / "b", one(4, ttft=0.5))
    assert ttft_means(here, there) == {"d b": [100, 500]}


def test_a_load_of_fewer_requests_is_another_load(tmp_path: Path) -> None:
    few = one(4, ttft=0.5)
    few = few.model_copy(update={"load": few.load.model_copy(update={"requests": 8})})
    folder = bench_folder(tmp_path / "b", one(4, ttft=0.1), few)
    assert ttft_means(folder) == {"d b": [100, 500]}
    report = read_report([folder])
    bars = bars_of(report.rows, report.names, prompt_sources, lambda _: None)
    assert [bar.text for bar in bars] == ["concurrency 4, 20 requests, 1 repeat", "concurrency 4, 8 requests, 1 repeat"]
