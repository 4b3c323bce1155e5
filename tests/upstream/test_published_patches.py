"""What docs/published-patches.md says about the published patches, each claim on the real code or interpreter."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.upstream.sources import installed_tree

pytestmark = pytest.mark.upstream


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
