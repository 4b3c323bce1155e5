"""Documents and tables beside the code of the releases: flags, lines of logs, reproductions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path

import pytest

from pdserve.known import FLAGS
from pdserve.patches.patch import in_range
from tests.doctor.symptom_lines import LINES
from tests.upstream.run import ALL_VLLM_VERSIONS, INSTALLED_VLLM, on
from tests.upstream.sources import installed_tree, source_tree

pytestmark = pytest.mark.upstream


RELEASES = (
    *(("vllm", version) for version in ALL_VLLM_VERSIONS),
    *(("lmcache", f"0.5.{number}") for number in (4, 5, 6)),
)


@pytest.mark.parametrize(("package", "version"), RELEASES)
def test_a_flag_is_missing_from_the_releases_of_its_ranges_and_from_no_other(package: str, version: str) -> None:
    """And one that is ignored says so in its range and in no other release."""
    tree = source_tree(package, version)
    there = {name for file in _parsers(package, tree) for name in re.findall(r'"--([a-z0-9-]+)"', file.read_text())}
    ours = [flag for flag in FLAGS if flag.package == package]
    lacking = {flag.name for flag in ours if not flag.ignored and in_range(version, flag.versions)}
    assert {flag.name for flag in ours} - there == lacking
    if package == "vllm":
        text = (tree / "vllm" / "engine" / "arg_utils.py").read_text()
        ignored = [flag for flag in ours if flag.ignored]
        said = [f"--{flag.name} is deprecated and" in text for flag in ignored]
        assert said == [in_range(version, flag.versions) for flag in ignored], [flag.name for flag in ignored]


def _parsers(package: str, tree: Path) -> Iterator[Path]:
    if package == "vllm":
        yield tree / "vllm" / "engine" / "arg_utils.py"
        yield from tree.glob("vllm/entrypoints/**/cli_args.py")
    for room in ("multiprocess", "distributed", "mp_observability"):
        yield from tree.glob(f"lmcache/v1/{room}/**/*.py")


def test_every_line_is_in_the_source_that_it_names() -> None:
    wrong = [
        (sample.call, sample.source)
        for sample in LINES
        if not any(
            sample.call in text for text in texts(installed_tree(sample.source.partition("/")[0]) / sample.source)
        )
    ]
    assert wrong == []


@cache
def texts(file: Path) -> list[str]:
    """Every text of a module, pieces that stand beside each other as one."""
    nodes = ast.walk(ast.parse(file.read_text()))
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


PAGE = Path(__file__).parents[2] / "docs" / "upstream-issues.md"
CASES = re.findall(r"```python\n(.*?)```\n+```text\n(.*?)```", PAGE.read_text(), re.DOTALL)
TITLES = re.findall(r"^## (.+)$", PAGE.read_text(), re.MULTILINE)


@on(INSTALLED_VLLM)
def test_every_issue_has_a_reproduction_that_shows_the_defect() -> None:
    assert len(CASES) == len(TITLES) >= 3
    for title, (code, printed) in zip(TITLES, CASES, strict=True):
        with redirect_stdout(StringIO()) as seen:
            exec(code, {"__name__": "__main__"})  # our own page
        assert seen.getvalue() == printed, title
