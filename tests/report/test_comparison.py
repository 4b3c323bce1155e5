"""The page of `pdserve compare`: what differs first, INVALID named, and no change within noise is called one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pdserve.bench.compare import compare
from pdserve.bench.result import RESULT, BenchResult
from pdserve.cli.compare import run_compare as run
from pdserve.errors import StateError
from pdserve.report.page import comparison_page
from pdserve.report.pictures import change_pictures
from tests.bench.test_compare import INVALID, measured, result
from tests.report.realistic import BEGAN, realistic_result


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


def test_figures_are_in_groups_and_what_nothing_was_counted_of_is_below() -> None:
    text = page_of(result(*[measured(0.1)] * 2), result(*[measured(0.2)] * 2))
    assert text.index(">latencies<") < text.index(">rates<") < text.index("0 on both sides: failed, cut.")
    assert "total per GPU" in rows(text)
    counted = realistic_result(4, began=BEGAN)
    assert {"prefix hit", "computed on prefill", "LMCache had"} <= set(rows(page_of(counted, counted)))


def test_results_within_noise_are_summed_up_as_that() -> None:
    a = result(*(measured(ttft) for ttft in (0.08, 0.10, 0.12)))
    b = result(*(measured(ttft) for ttft in (0.10, 0.12, 0.14)))
    text = page_of(a, b)
    assert re.search(r"None of \d+ figures changed by more than the noise", text)
    assert "real:" not in text
    assert "B is better" not in text


def test_single_repeats_are_not_judged_and_the_page_tells_why() -> None:
    text = page_of(result(measured(0.1)), result(measured(9.0)))
    assert "Nothing can be judged" in text
    assert "--repeats 3" in text
    assert "real:" not in text
    assert "not judged" in rows(text)["TTFT mean"]


def test_invalid_repeats_are_named_with_their_reason_and_count_in_nothing() -> None:
    a = result(measured(0.1), measured(0.11), measured(5.0, INVALID))
    text = page_of(a, result(*(measured(ttft) for ttft in (0.1, 0.11, 0.12))))
    assert "1 of 6 measurements are INVALID" in text
    assert "1 of 3 repeats of A are INVALID (errors)" in text
    assert "105.00" in rows(text)["TTFT mean"]


def test_two_results_of_invalid_repeats_alone_have_no_figures() -> None:
    a, b = result(measured(0.1, INVALID)), result(measured(0.1))
    assert "No load has valid measurements in both" in page_of(a, b)
    assert change_pictures(compare(a, b)) == []


def test_hostile_names_are_text() -> None:
    a = result(measured(0.1), recipe="name: <script>alert(1)</script>\n")
    text = page_of(a, result(measured(0.1)))
    assert "<script>" not in text
    assert "&lt;script&gt;" in text


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
