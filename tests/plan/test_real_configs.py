"""The commands of every recipe for GPUs, as vLLM's own configuration classes take them, without a GPU.

Which classes are built, and which cannot be without a device or a model, is in real_configs.py.
"""

from __future__ import annotations

import ast
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pdserve.plan.model import Plan
from pdserve.plan.process import Process
from pdserve.roles import ENGINE_ROLES
from tests.plan.golden import RECIPES, shipped_plan
from tests.plan.kit import value_of
from tests.plan.test_real import arguments, ask

pytestmark = pytest.mark.real

PLANS: dict[str, Plan] = {
    name: planned for name in RECIPES if (planned := shipped_plan(name)).platform in ("rocm", "cuda")
}
ENGINES: dict[str, Process] = {
    f"{name}/{process.name}": process
    for name, planned in PLANS.items()
    for process in planned.processes
    if process.role in ENGINE_ROLES
}
BROKEN = {
    "block size 0": ["--block-size", "0"],
    "no such dtype": ["--kv-cache-dtype", "fp7"],
    "no such tool parser": ["--enable-auto-tool-choice", "--tool-call-parser", "kimi_k0"],
    "no such reasoning parser": ["--reasoning-parser", "kimi_k0"],
    "tools without a parser": ["--enable-auto-tool-choice"],
    "more tokens a step than fit": ["--max-num-seqs", "512", "--max-num-batched-tokens", "16"],
}


@pytest.fixture(scope="module")
def answer() -> dict[str, Any]:
    wanted = {name: arguments(process) for name, process in ENGINES.items()}
    return ask("real_configs", json.dumps({**wanted, **{name: ["m", *flags] for name, flags in BROKEN.items()}}))


@pytest.mark.parametrize("name", ENGINES)
def test_vllm_configures_itself_by_the_command(answer: dict[str, Any], name: str) -> None:
    engine, made = ENGINES[name], answer[name]
    assert "error" not in made, made["error"]
    instance = PLANS[name.partition("/")[0]].instance_of(engine.name)
    assert made["world_size"] == sum(process.ranks.workers for process in instance if process.ranks is not None)
    transfer = json.loads(value_of(engine, "--kv-transfer-config"))
    assert made["kv_role"] == transfer["kv_role"]
    if module := transfer.get("kv_connector_module_path"):
        assert made["connector"] == module


def test_the_kimi_recipes_mean_what_vllm_makes_of_them(answer: dict[str, Any]) -> None:
    for name in ENGINES:
        if name.startswith("kimi"):
            made = answer[name]
            assert (made["block_size"], made["cache_dtype"], made["max_num_seqs"]) == (16, "fp8", 32)
            assert made["tool_parser"].startswith("KimiK2")
            assert made["reasoning_parser"].startswith("KimiK2")
            mode = None if name.startswith("kimi-mi355x-lmcache") else "PIECEWISE"
            assert made["cudagraph_mode"] == mode


def test_vllm_takes_each_rank_of_the_wide_recipe_for_a_server_of_its_own(answer: dict[str, Any]) -> None:
    for role in ("prefill", "decode"):
        names = [name for name, engine in ENGINES.items() if name.startswith("deepseek") and engine.role == role]
        assert [answer[name]["rank"] for name in names] == list(range(16))
        assert all(answer[name]["own_ranks_only"] for name in names)


@pytest.mark.parametrize("name", BROKEN)
def test_what_vllm_would_refuse_is_refused_here(answer: dict[str, Any], name: str) -> None:
    assert "error" in answer[name], "the check could not fail"


def test_aiters_mla_backend_takes_blocks_of_the_recipes_size() -> None:
    """Read, not imported: the module needs AITER. The default that vLLM then keeps is the recipe's."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    backend = ast.parse((package / "v1/attention/backends/mla/rocm_aiter_mla.py").read_text())
    [sizes] = [
        ast.unparse(statement)
        for node in ast.walk(backend)
        if isinstance(node, ast.FunctionDef) and node.name == "get_supported_kernel_block_sizes"
        for statement in node.body
        if isinstance(statement, ast.Return)
    ]
    assert sizes == "return [MultipleOf(1)]"
    assert "DEFAULT_BLOCK_SIZE: ClassVar[int] = 16" in (package / "config/cache.py").read_text()
