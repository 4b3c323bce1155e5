"""The table of flags is what the argument parsers of the releases have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.known.flags import FLAGS
from pdserve.patches.patch import in_range
from tests.upstream.run import ALL_VLLM_VERSIONS
from tests.upstream.sources import source_tree

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
