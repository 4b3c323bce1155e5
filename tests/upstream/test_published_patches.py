"""What docs/published-patches.md says about the published patches, each claim on the real code or interpreter."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.upstream.fingerprints import LMCACHE_VERSIONS
from tests.upstream.sources import source_tree

pytestmark = pytest.mark.upstream
CONNECTOR = Path("lmcache/integration/vllm/lmcache_mp_connector.py")


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


@pytest.mark.parametrize("version", LMCACHE_VERSIONS)
def test_the_number_of_matched_tokens_is_a_pair_and_never_a_number(version: str) -> None:
    """`full <= 0`, as published, raises TypeError on it."""
    function = _method(version, "get_num_new_matched_tokens")
    returns = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
    assert returns
    assert all(isinstance(value, ast.Tuple) and len(value.elts) == 2 for value in returns)
    with pytest.raises(TypeError):
        (256, True) <= 0  # type: ignore[operator]  # noqa: B015


@pytest.mark.parametrize("version", LMCACHE_VERSIONS)
def test_the_block_size_that_the_cap_was_counted_in_is_an_attribute_that_the_connector_does_not_have(
    version: str,
) -> None:
    assigned = {
        target.attr
        for node in ast.walk(_class(version))
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Attribute)
    }
    assert "block_size" not in assigned


@pytest.mark.parametrize("version", LMCACHE_VERSIONS)
def test_state_that_the_scheduler_makes_cannot_be_cleaned_where_transfers_are_polled(version: str) -> None:
    """get_num_new_matched_tokens runs in EngineCore, get_finished in the workers: upstream's own state says so."""
    scheduler, worker = _method(version, "get_num_new_matched_tokens"), _method(version, "get_finished")
    assert "scheduler_adapter" in _attributes(scheduler)
    assert "worker_adapter" in _attributes(worker)
    assert "request_trackers" not in _attributes(worker)


def _class(version: str) -> ast.ClassDef:
    module = ast.parse((source_tree("lmcache", version) / CONNECTOR).read_text())
    (definition,) = [
        node for node in ast.walk(module) if isinstance(node, ast.ClassDef) and node.name == "LMCacheMPConnector"
    ]
    return definition


def _method(version: str, name: str) -> ast.FunctionDef:
    (method,) = [node for node in _class(version).body if isinstance(node, ast.FunctionDef) and node.name == name]
    return method


def _attributes(function: ast.FunctionDef) -> set[str]:
    return {node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)}
