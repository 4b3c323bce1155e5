"""Connectors, offloading and stores beyond the golden plans, and roles that cannot hand over KV."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdserve.errors import RecipeError
from pdserve.plan.model import Plan
from pdserve.plan.process import Process
from pdserve.recipe.connectors.registry import class_names
from tests.plan.kit import (
    LMCACHE,
    MOONCAKE,
    MULTI,
    NIXL,
    aggregated,
    hosts,
    plan,
    recipe,
    value_of,
    with_lmcache,
)
from tests.plan.shapes import OFFLOADING, RAW, STORE
from tests.tables import each_row


def config(built: Plan, process: str) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(value_of(built.process(process), "--kv-transfer-config"))
    return parsed


@each_row(
    "platform, server, engine, asked",
    [
        ("cpu", "auto", None, "engine_driven"),
        ("cpu", "engine_driven", None, "engine_driven"),
        ("cpu", "auto", "lmcache_driven", "lmcache_driven"),
        ("cuda", "lmcache_driven", None, "lmcache_driven"),
        ("cuda", "auto", None, "lmcache_driven"),
    ],
)
def test_the_transfer_mode_is_always_an_explicit_flag(
    platform: str, server: str, engine: str | None, asked: str
) -> None:
    connector = {"kind": "multi", "of": [{**LMCACHE, "transfer_mode": engine}, MOONCAKE]}
    change = {"platform": platform, "prefill": {"connector": connector}}
    nodes = hosts(2) if platform == "cuda" else ()
    child = config(plan(recipe(with_lmcache(transfer_mode=server), change), *nodes), "prefill-0")
    extra = child["kv_connector_extra_config"]["connectors"][0]["kv_connector_extra_config"]
    assert extra["lmcache.mp.mp_transfer_mode"] == asked


def test_an_aggregated_engine_without_lmcache_has_no_connector() -> None:
    built = plan(recipe(aggregated(connector=None), {"lmcache": None}))
    assert "--kv-transfer-config" not in built.process("aggregated-0").argv


def test_a_raw_mapping_is_searched_for_its_classes() -> None:
    nested = {
        "kind": "raw",
        "config": {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [RAW, "nonsense"]}},
    }
    connector = recipe({"prefill": {"connector": nested}}).roles()[0][1].connector
    assert class_names(connector) == {"MultiConnector", "MooncakeConnector"}


OTHER = {"kind": "raw", "config": {"kv_connector": "OtherConnector"}}


@each_row(
    "changes, message",
    [
        ({"decode": {"connector": NIXL}}, "decode: nixl"),
        ({"prefill": {"connector": LMCACHE}}, "prefill: none, decode: mooncake"),
        ({"prefill": {"connector": OTHER}}, "prefill: none"),
        ({"decode": {"connector": MULTI}}, "decode uses lmcache-mp, but no LMCache server is planned for it"),
        ({"prefill": {"connector": MOONCAKE}}, "no engine attaches to LMCache"),
        ({**aggregated(connector=MOONCAKE), "lmcache": None}, "an aggregated engine has neither"),
    ],
)
def test_roles_that_cannot_hand_over_kv_or_have_no_server_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        plan(recipe(with_lmcache(), changes))


GIB = 1 << 30


def engine(platform: str, **parallel: int) -> Process:
    alone = aggregated(connector=OFFLOADING, parallel=parallel)
    return plan(recipe(alone, {"lmcache": None, "platform": platform})).process("aggregated-0")


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


def with_store(**section: Any) -> dict[str, Any]:
    """A store beside Mooncake on prefill."""
    return {
        "prefill": {"connector": {"kind": "multi", "of": [MOONCAKE, STORE]}},
        "mooncake_store": {"segment_gib": 2, "buffer_gib": 0.5, "protocol": "tcp", **section},
    }
