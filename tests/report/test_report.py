"""The report: verdicts at every row, provenance first, one file that loads nothing, no INVALID point in a curve."""

from __future__ import annotations

import builtins
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from pdserve.bench.validity import Reason
from pdserve.cli.bench.report import run
from pdserve.errors import PreflightError, StateError
from pdserve.report.page import page
from pdserve.report.pictures import check_matplotlib, pictures
from pdserve.report.rows import read_report
from pdserve.report.stages import prompt_sources, stages
from pdserve.sweep.record import SweepFolder
from tests.report.results import bench_folder, one, sweep_point


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
    return Parsed(page(read_report(folders), []))


def test_each_row_has_its_verdict_and_its_reason(tmp_path: Path) -> None:
    shown = parsed(bench_folder(tmp_path / "b", one(1), one(4, valid=False)))
    assert shown.column(0) == ["VALID", "INVALID"]
    assert shown.column(2) == ["concurrency 1", "concurrency 4"]
    assert "1 of 2 rows are INVALID" in " ".join(shown.texts)
    assert any("errors:" in text for text in shown.texts)


def test_a_point_that_is_invalid_makes_its_valid_measurement_invalid(tmp_path: Path) -> None:
    sweep = SweepFolder(tmp_path)
    sweep_point(sweep, (("c", "1"),), one(), "INVALID", Reason(check="cold-cache", text="it was warm"))
    sweep_point(sweep, (("c", "2"),), one())
    report = read_report([tmp_path])
    assert {(row.series, row.valid) for row in report.rows} == {("c=1", False), ("c=2", True)}
    assert "it was warm" in "".join(Parsed(page(report, [])).texts)


def test_a_point_that_never_started_is_a_row_without_figures(tmp_path: Path) -> None:
    sweep_point(SweepFolder(tmp_path), (("c", "1"),), None, "INVALID", Reason(check="start", text="no engine"))
    shown = parsed(tmp_path)
    texts = " ".join(shown.texts)
    assert "nothing was measured" in texts
    assert "no engine" in texts
    assert shown.rows[1][0] == "INVALID"


def test_provenance_comes_before_pictures_and_names_what_differs(tmp_path: Path) -> None:
    a = bench_folder(tmp_path / "a", one(), vllm="0.32.0", recipe="name: first\n")
    b = bench_folder(tmp_path / "b", one(), vllm="0.33.0", recipe="name: second\n")
    text = page(read_report([a, b]), [])
    assert text.index("What was measured") < text.index("0.32.0 / 0.33.0") < text.index("<h2>Pictures")
    assert "name: first" in text
    assert "name: second" in text


def test_the_page_is_one_file_for_a_phone_in_light_and_dark_and_runs_nothing(tmp_path: Path) -> None:
    folder = bench_folder(tmp_path / "b", one(), recipe="name: <script>alert(1)</script>\n")
    text = page(read_report([folder]), [{"title": "t", "note": "n <b>", "svg": "<svg><path/></svg>"}])
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


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="neither a sweep nor a benchmark"):
        read_report([tmp_path])


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
    return {picture.name: picture for picture in pictures(read_report(folders).rows)}


def test_no_line_passes_through_an_invalid_point_and_it_is_a_cross_with_its_name(tmp_path: Path) -> None:
    folder = bench_folder(
        tmp_path / "b", one(1, ttft=0.1), one(4, ttft=0.2), one(8, ttft=9.0, valid=False), one(8, ttft=0.4)
    )
    (axes,) = drawn(folder)["ttft"].figure.axes
    (line,) = axes.lines
    assert [tuple(map(round, point)) for point in line.get_xydata()] == [(1, 100), (4, 200), (8, 400)]
    labels = axes.get_legend_handles_labels()[1]
    assert any(label.startswith("INVALID: ") for label in labels)
    crosses = [tuple(map(round, offset)) for each in axes.collections for offset in each.get_offsets()]
    assert (8, 9000) in crosses


def test_a_curve_of_invalid_points_alone_has_no_line(tmp_path: Path) -> None:
    made = drawn(bench_folder(tmp_path / "b", one(1, valid=False), one(4, valid=False)))
    for name in ("throughput", "ttft", "itl"):
        assert not made[name].figure.axes[0].lines
    for picture in made.values():
        assert "2 of 2 measurements INVALID" in picture.figure.axes[0].get_title()


def test_pictures_take_the_ink_of_the_page_share_no_ids_and_draw_hostile_names(tmp_path: Path) -> None:
    sweep_point(SweepFolder(tmp_path), (("engine.env.X", "$a$ <script>"),), one())
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
    folder = bench_folder(tmp_path / "b", one(1), one(4))
    run([folder], tmp_path / "r.html", tmp_path / "pictures")
    assert (tmp_path / "r.html").read_text().count("<svg") == 5
    assert {file.name for file in (tmp_path / "pictures").iterdir()} == {
        f"{name}.{kind}" for name in ("throughput", "ttft", "itl", "sources", "stages") for kind in ("png", "svg")
    }
