"""The page of `pdserve compare`: what differs first, INVALID named, and no change within noise is called one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pdserve.bench.result import RESULT, BenchResult
from pdserve.cli.compare import compare as run
from pdserve.errors import StateError
from pdserve.report.page import comparison_page
from pdserve.sweep.compare import compare
from tests.report.results import BEGAN, realistic_result
from tests.sweep.test_compare import measured, result


def page_of(a: BenchResult, b: BenchResult) -> str:
    return re.sub(r"\s+", " ", comparison_page(("first", "second"), ["d"], compare(a, b)))


def rows(text: str) -> dict[str, str]:
    """Figure -> its row, without tags."""
    body = text[text.index('class="changes') :]
    found = re.findall(r"<tr class=\"(?:real|noise)\">(.*?)</tr>", body)
    plain = [re.sub(r"<[^>]+>", "|", row) for row in found]
    return {row.strip("|").split(",")[0]: row for row in plain}


def test_what_differs_comes_first() -> None:
    a, b = realistic_result(4, began=BEGAN), realistic_result(4, began=BEGAN, faster=1.3, vllm="0.33.0")
    text = page_of(a, b)
    assert text.index("What differs in what was measured") < text.index("0.33.0") < text.index("points that both have")
    assert "A is first, B is second" in text


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
    run(str(tmp_path / "a"), str(tmp_path / "b"), html=page)
    assert f"page: {page}" in capsys.readouterr().out
    with pytest.raises(StateError, match="cannot be written") as refused:
        run(str(tmp_path / "a"), str(tmp_path / "b"), html=tmp_path / "none" / "page.html")
    assert "--html FILE" in refused.value.render()
