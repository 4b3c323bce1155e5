"""vLLM's own offloading beyond its golden plan: as a child, its memory, and where it cannot be."""

from __future__ import annotations

import json

import pytest

from pdserve.errors import RecipeError
from pdserve.plan.process import Process
from tests.plan.kit import NIXL, aggregated, on_gpus, plan, recipe, value_of
from tests.plan.shapes import OFFLOADING, both
from tests.tables import each_row

GIB = 1 << 30


def engine(platform: str, **parallel: int) -> Process:
    alone = aggregated(connector=OFFLOADING, parallel=parallel)
    return plan(recipe(alone, {"lmcache": None, "platform": platform})).process("aggregated-0")


def test_as_a_child_it_stores_and_loads_whatever_the_role() -> None:
    built = plan(recipe(on_gpus(), both({"kind": "multi", "of": [NIXL, OFFLOADING]})))
    for name in ("prefill-0", "decode-0"):
        config = json.loads(value_of(built.process(name), "--kv-transfer-config"))
        child = config["kv_connector_extra_config"]["connectors"][1]
        assert (child["kv_connector"], child["kv_role"]) == ("OffloadingConnector", "kv_both")


def test_vllm_refuses_it_on_a_cpu_and_so_does_the_plan() -> None:
    with pytest.raises(RecipeError, match="aggregated uses offloading on a CPU") as caught:
        engine("cpu")
    assert "only supported on CUDA-alike" in (caught.value.cause or "")


@each_row(
    "platform, parallel, memory, in_shm",
    [("cuda", {"tp": 4}, 4, 4), ("rocm", {"tp": 4}, 4, 0), ("cuda", {"tp": 2, "dp": 2}, 8, 8)],
)
def test_its_memory_is_that_of_each_rank_and_not_of_each_worker(
    platform: str, parallel: dict[str, int], memory: int, in_shm: int
) -> None:
    made = engine(platform, **parallel)
    assert (made.host_bytes, made.shm_bytes) == (memory * GIB, in_shm * GIB)
