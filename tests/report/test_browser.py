"""The pages in a headless Chromium: what a reader sees on a desktop and a phone, in light and in dark.

Chromium comes from Debian's packages (browser.py). Where it can neither be found nor fetched these tests are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pdserve.bench.result import RESULT
from pdserve.cli import compare
from tests.cluster.machine import LabError
from tests.report.browser import DESKTOP, PHONE, Page, Scheme, opened, programs
from tests.report.realistic import BEGAN, realistic_result, realistic_sweep

pytestmark = [pytest.mark.upstream, pytest.mark.process]

VIEWS: tuple[tuple[int, Scheme], ...] = ((DESKTOP, "light"), (PHONE, "dark"))
SMALLEST = 9.0
"""Pixels of a letter's height that can still be read."""
VISIBLE_TEXT = """
const scale = m => Math.hypot(m.a, m.b);
return [...document.querySelectorAll('figure svg text')].filter(e => e.checkVisibility())
    .map(e => [e.textContent.trim(), parseFloat(getComputedStyle(e).fontSize) * scale(e.getScreenCTM())])
"""
OUTSIDE = """
return [...document.querySelectorAll('figure svg')].flatMap(svg => {
    const box = svg.getBoundingClientRect();
    return [...svg.querySelectorAll('text')].filter(e => e.checkVisibility()).filter(e => {
        const r = e.getBoundingClientRect();
        return r.left < box.left - 1 || r.right > box.right + 1 || r.bottom > box.bottom + 1 || r.top < box.top - 1;
    }).map(e => e.textContent.trim());
})
"""
CONTRAST = """
const channel = c => { c /= 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
const luminance = c => {
    const [r, g, b] = c.match(/[0-9.]+/g).map(Number).map(channel);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
const paper = luminance(getComputedStyle(document.body).backgroundColor);
return Math.min(...[...document.querySelectorAll('p, td, th, li, h1, h2, h3, figcaption, .soft')]
    .map(e => ratio(luminance(getComputedStyle(e).color), paper)));
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    try:
        programs()
    except LabError as error:
        pytest.skip(f"no Chromium: neither on this machine nor from Debian's packages ({str(error).splitlines()[0]})")
    folder = tmp_path_factory.mktemp("pages")
    compare.run_report([realistic_sweep(folder / "sweep")], folder / "report.html", None)
    for name, faster in (("a", 1.0), ("b", 1.3)):
        (folder / name).mkdir()
        result = realistic_result(4, began=BEGAN, faster=faster, dies=name == "b")
        (folder / name / RESULT).write_text(result.model_dump_json())
    compare.run_compare(str(folder / "a"), str(folder / "b"), as_json=False, page=folder / "compare.html")
    return {"report": folder / "report.html", "compare": folder / "compare.html"}


@pytest.fixture(scope="module", params=["report", "compare"])
def views(request: pytest.FixtureRequest, pages: dict[str, Path]) -> Iterator[dict[tuple[int, Scheme], Page]]:
    """A page as each reader has it."""
    with ExitStack() as stack:
        yield {
            (width, scheme): stack.enter_context(opened(pages[request.param], width, scheme)) for width, scheme in VIEWS
        }


def test_nothing_is_wider_than_the_window(views: dict[tuple[int, Scheme], Page]) -> None:
    for (width, _), page in views.items():
        assert page.run("return document.documentElement.scrollWidth") == width


def test_the_text_of_pictures_can_be_read_and_stays_inside(views: dict[tuple[int, Scheme], Page]) -> None:
    for page in views.values():
        texts = page.run(VISIBLE_TEXT)
        assert len(texts) > 20
        assert [text for text in texts if text[1] < SMALLEST] == []
        assert page.run(OUTSIDE) == []


def test_light_and_dark_differ_and_text_stands_out_in_both(views: dict[tuple[int, Scheme], Page]) -> None:
    papers = [page.run("return getComputedStyle(document.body).backgroundColor") for page in views.values()]
    assert len(set(papers)) == 2
    for page in views.values():
        assert page.run(CONTRAST) > 4.5, "WCAG AA"


def test_a_page_loads_nothing_and_runs_nothing(views: dict[tuple[int, Scheme], Page]) -> None:
    for page in views.values():
        assert page.run("return performance.getEntriesByType('resource').length") == 0
        assert page.run("return document.scripts.length") == 0


def test_a_reader_of_the_report_finds_provenance_verdicts_and_the_death(pages: dict[str, Path]) -> None:
    with opened(pages["report"], PHONE, "light") as page:
        headings = page.run("return [...document.querySelectorAll('h2')].map(e => e.innerText)")
        assert headings[0] == "What was measured, on what"
        assert page.run("return document.querySelector('#verdict').innerText").startswith("4 of 25 rows are INVALID")
        shared = page.run("return document.querySelector('#shared').innerText")
        assert "commit of pdserve" in shared
        assert "NVIDIA H100" in shared
        verdicts = page.run("return [...document.querySelectorAll('#figures tbody tr')].map(e => e.cells[0].innerText)")
        assert (len(verdicts), verdicts.count("INVALID")) == (25, 4)
        titles = page.run("return [...document.querySelectorAll('svg')].map(e => e.getAttribute('aria-label'))")
        assert len(titles) == 7
        captions = page.run("return [...document.querySelectorAll('figcaption li')].map(e => e.innerText)")
        assert any("decode-0 died: was killed by SIGKILL" in caption for caption in captions)
        # The verdict stays in view while the table is scrolled.
        page.run("document.querySelector('#figures').parentElement.scrollLeft = 400")
        left = page.run("return document.querySelector('#figures tbody td').getBoundingClientRect().left")
        assert 0 <= left <= 20


def test_a_reader_of_the_comparison_sees_what_differs_before_any_figure(pages: dict[str, Path]) -> None:
    with opened(pages["compare"], PHONE, "light") as page:
        text = page.run("return document.body.innerText")
        assert text.index("What differs in what was measured") < text.index("TTFT mean")
        assert "1 of 3 repeats of B are INVALID (processes)" in text
        judgements = page.run("return [...document.querySelectorAll('.changes td:last-child')].map(e => e.innerText)")
        assert set(judgements) <= {"real: better", "real: worse", "within noise"}
        assert "real: better" in judgements
