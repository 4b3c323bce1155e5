"""Documents and tables beside the code of the releases: flags, lines of logs, reproductions, published patches."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from pdserve.known.flags import FLAGS
from pdserve.patches.patch import in_range
from tests.doctor.symptom_lines import LINES
from tests.upstream.run import ALL_VLLM_VERSIONS
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
        (sample.rule, sample.process, sample.source)
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


def test_every_issue_has_a_reproduction_that_shows_the_defect() -> None:
    """One after the other in one interpreter, because importing vLLM is what takes time."""
    done = subprocess.run(
        [sys.executable, "-c", "\nprint('---')\n".join(code for code, _ in CASES)],
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_PLUGINS": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(CASES) == len(TITLES) >= 3
    assert dict(zip(TITLES, done.stdout.split("---\n"), strict=True)) == dict(
        zip(TITLES, (printed for _, printed in CASES), strict=True)
    )


def run(folder: Path, code: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", code],
        env={"PYTHONPATH": str(folder), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_import_hook_on_builtins_never_sees_a_connector_that_vllm_imports_by_module_path(tmp_path: Path) -> None:
    """kv_connector_module_path goes through importlib.import_module (vLLM's connector factory)."""
    (tmp_path / "connector_module.py").write_text("")
    hook = """
import builtins, importlib
seen, original = [], builtins.__import__
def hook(name, *rest, **more):
    seen.append(name)
    return original(name, *rest, **more)
builtins.__import__ = hook
importlib.import_module("connector_module")
print("connector_module" in seen)
import json
print("json" in seen)
"""
    assert run(tmp_path, hook).stdout.split() == ["False", "True"]


def test_one_patch_that_fails_in_sitecustomize_drops_the_others_and_the_process_goes_on(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import first_patch_whose_target_has_moved\nimport second_patch\n",
    )
    (tmp_path / "second_patch.py").write_text("import builtins\nbuiltins.second_patch_is_in = True\n")
    done = run(tmp_path, "import builtins; print(hasattr(builtins, 'second_patch_is_in'))")
    assert (done.returncode, done.stdout.strip()) == (0, "False")


def test_lmcaches_connector_is_not_what_the_published_patches_take_it_for() -> None:
    """The number of matched tokens is a pair and never a number: `full <= 0` raises TypeError on it. The block size in
    which the cap was counted is an attribute that the connector does not have. And what the scheduler makes cannot be
    cleaned where transfers are polled: get_num_new_matched_tokens runs in EngineCore, get_finished in workers."""
    module = ast.parse((installed_tree("lmcache") / "lmcache/integration/vllm/lmcache_mp_connector.py").read_text())
    [cls] = [n for n in ast.walk(module) if isinstance(n, ast.ClassDef) and n.name == "LMCacheMPConnector"]
    methods = {node.name: node for node in cls.body if isinstance(node, ast.FunctionDef)}
    scheduler, worker = methods["get_num_new_matched_tokens"], methods["get_finished"]
    returns = [node.value for node in ast.walk(scheduler) if isinstance(node, ast.Return)]
    assert [value for value in returns if isinstance(value, ast.Tuple) and len(value.elts) == 2] == returns != []
    stored = [n for n in ast.walk(cls) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    assert "block_size" not in {node.attr for node in stored}
    assert "scheduler_adapter" in _attributes(scheduler)
    assert "worker_adapter" in _attributes(worker)
    assert "request_trackers" not in _attributes(worker)


def _attributes(function: ast.FunctionDef) -> set[str]:
    return {node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)}
