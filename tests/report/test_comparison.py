"""The page of `pdserve compare`: what differs first, INVALID named, and no change within noise is called one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pdserve.bench.compare import compare
from pdserve.bench.result import RESULT, BenchResult, Measurement
from pdserve.bench.validity import Reason
from pdserve.cli.compare import run_compare as run
from pdserve.errors import StateError
from pdserve.report.page import comparison_page
from pdserve.report.rows import read_report
from pdserve.sweep.record import SweepFolder
from tests.bench.test_compare import measured, result
from tests.report.results import BEGAN, bench_folder, one, realistic_result, sweep_point
from tests.tables import each_row


def page_of(a: BenchResult, b: BenchResult) -> str:
    return re.sub(r"\s+", " ", comparison_page(("first", "second"), (a, b), compare(a, b), []))


def rows(text: str) -> dict[str, str]:
    """Figure -> its row, without tags."""
    body = text[text.index('class="changes') :]
    found = re.findall(r"<tr class=\"(?:real|noise)\">(.*?)</tr>", body)
    plain = [re.sub(r"<[^>]+>", "|", row) for row in found]
    return {row.strip("|").split(",")[0]: row for row in plain}


def test_what_differs_comes_first_and_what_is_the_same_is_there(tmp_path: Path) -> None:
    a, b = realistic_result(4, began=BEGAN), realistic_result(4, began=BEGAN, faster=1.3, vllm="0.33.0")
    text = page_of(a, b)
    assert text.index("What differs in what was measured") < text.index("0.33.0") < text.index(">Changes<")
    assert "A is first, B is second" in text
    shared = text[text.index('id="shared"') : text.index("Resolved recipe")]
    assert "commit of pdserve" in shared
    assert "NVIDIA H100" in shared
    assert "version of vllm" not in shared


def test_only_a_change_beyond_the_noise_is_real_and_has_no_parentheses() -> None:
    a = result(*(measured(ttft) for ttft in (0.100, 0.101, 0.102)))
    b = result(*(measured(ttft) for ttft in (0.200, 0.201, 0.202)))
    shown = rows(page_of(a, b))
    assert "real: worse" in shown["TTFT mean"]
    assert "+99.0 %" in shown["TTFT mean"]
    assert "(+" not in shown["TTFT mean"]
    assert "within noise" in shown["ITL mean"]
    assert "(+0.0 %)" in shown["ITL mean"]


def test_the_verb_writes_the_page(pdserve_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, faster in (("a", 1.0), ("b", 1.3)):
        (tmp_path / name).mkdir()
        (tmp_path / name / RESULT).write_text(realistic_result(4, began=BEGAN, faster=faster).model_dump_json())
    page = tmp_path / "page.html"
    run(str(tmp_path / "a"), str(tmp_path / "b"), as_json=False, page=page)
    assert f"page: {page}" in capsys.readouterr().out
    assert page.read_text().count("<svg") == 1
    with pytest.raises(StateError, match="cannot be written") as refused:
        run(str(tmp_path / "a"), str(tmp_path / "b"), as_json=False, page=tmp_path / "none" / "page.html")
    assert "--html FILE" in refused.value.render()


# --- the result of a point, given without its sweep: what the sweep objects to counts all the same

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
