"""The table of flags is what the argument parsers of the releases have."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from pdserve.known.flags import FLAGS, Flag
from pdserve.patches.patch import in_range
from tests.upstream.sources import source_tree

pytestmark = pytest.mark.upstream
READ = {
    "vllm": ("0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"),
    "lmcache": ("0.5.4", "0.5.5", "0.5.6"),
}


@pytest.mark.parametrize(("package", "name"), sorted({(flag.package, flag.name) for flag in FLAGS}))
def test_a_flag_is_missing_from_the_releases_of_its_ranges_and_from_no_other(package: str, name: str) -> None:
    lacking = [each.versions for each in FLAGS if (each.package, each.name) == (package, name) and not each.ignored]
    for version in READ[package]:
        expected = any(in_range(version, versions) for versions in lacking)
        assert (name not in flags(package, version)) == expected, version


@pytest.mark.parametrize("flag", [each for each in FLAGS if each.ignored], ids=lambda flag: flag.name)
def test_a_flag_that_is_ignored_says_so_in_its_range_and_in_no_other_release(flag: Flag) -> None:
    for version in READ[flag.package]:
        text = (source_tree(flag.package, version) / "vllm" / "engine" / "arg_utils.py").read_text()
        assert (f"--{flag.name} is deprecated and" in text) == in_range(version, flag.versions), version


@cache
def flags(package: str, version: str) -> frozenset[str]:
    files = _parsers(package, source_tree(package, version))
    return frozenset(name for file in files for name in re.findall(r'"--([a-z0-9-]+)"', file.read_text()))


def _parsers(package: str, tree: Path) -> list[Path]:
    if package == "vllm":
        return [tree / "vllm" / "engine" / "arg_utils.py", *tree.glob("vllm/entrypoints/**/cli_args.py")]
    return [
        *tree.glob("lmcache/v1/multiprocess/**/*.py"),
        *tree.glob("lmcache/v1/distributed/**/*.py"),
        *tree.glob("lmcache/v1/mp_observability/**/*.py"),
    ]
