"""vLLM's own offloading in a plan: its mapping, its memory, and where it cannot be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdserve.errors import RecipeError
from tests.plan.kit import MOONCAKE, NIXL, aggregated, on_gpus, plan, recipe, value_of

GIB = 1 << 30
OFFLOAD: dict[str, Any] = {"kind": "offloading", "cpu_gib": 4}
CONFIG = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "cpu_bytes_to_use": 4 * GIB,
        "blocks_per_chunk": 1,
        "eviction_policy": "lru",
        "store_threshold": 0,
        "offload_prompt_only": True,
    },
}


def whole(platform: str = "cuda", **role: Any) -> dict[str, Any]:
    """An aggregated engine on an accelerator, with offloading alone."""
    return {**aggregated(connector=OFFLOAD, **role), "lmcache": None, "platform": platform}


def test_alone_it_serves_an_aggregated_engine() -> None:
    engine = plan(recipe(whole())).process("aggregated-0")
    assert json.loads(value_of(engine, "--kv-transfer-config")) == {**CONFIG, "kv_load_failure_policy": "recompute"}
    assert "--enable-prefix-caching" in engine.argv
    assert engine.packages == ("vllm",)


@pytest.mark.parametrize("transfer", [{**MOONCAKE, "protocol": "rdma"}, NIXL])
def test_as_a_child_it_stores_and_loads_whatever_the_role(transfer: dict[str, Any]) -> None:
    both = {"connector": {"kind": "multi", "of": [transfer, OFFLOAD]}}
    built = plan(recipe(on_gpus(), {"prefill": both, "decode": both}))
    for name in ("prefill-0", "decode-0"):
        config = json.loads(value_of(built.process(name), "--kv-transfer-config"))
        assert config["kv_connector_extra_config"]["connectors"][1] == CONFIG


def test_vllm_refuses_it_on_a_cpu_and_so_does_the_plan() -> None:
    with pytest.raises(RecipeError, match="aggregated uses offloading on a CPU") as caught:
        plan(recipe(whole("cpu")))
    assert "only supported on CUDA-alike" in (caught.value.cause or "")


@pytest.mark.parametrize(("platform", "in_shm"), [("cuda", 4 * GIB), ("rocm", 0)])
def test_its_memory_is_that_of_the_engine_not_of_each_worker(platform: str, in_shm: int) -> None:
    engine = plan(recipe(whole(platform, parallel={"tp": 4}))).process("aggregated-0")
    assert (engine.host_bytes, engine.shm_bytes) == (4 * GIB, in_shm)


def test_each_data_parallel_rank_has_memory_of_its_own() -> None:
    engine = plan(recipe(whole(parallel={"tp": 2, "dp": 2}))).process("aggregated-0")
    assert engine.host_bytes == 2 * 4 * GIB
