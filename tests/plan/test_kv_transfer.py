"""The mapping that vLLM gets for each connector."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdserve.errors import RecipeError
from pdserve.plan.model import Plan
from pdserve.recipe.connectors.registry import class_names
from tests.plan.kit import (
    LMCACHE,
    MOONCAKE,
    MULTI,
    NIXL,
    aggregated,
    hosts,
    on_gpus,
    plan,
    recipe,
    value_of,
    with_lmcache,
)

LMCACHE_CHILD = {
    "kv_connector": "LMCacheMPConnector",
    "kv_connector_module_path": "pdserve.connectors.lmcache_mp",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "lmcache.mp.host": "tcp://127.0.0.1",
        "lmcache.mp.port": 5555,
        "lmcache.mp.mq_timeout": 60,
        "lmcache.mp.heartbeat_interval": 10,
        "lmcache.mp.mp_transfer_mode": "engine_driven",
    },
}


def config(built: Plan, process: str) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(value_of(built.process(process), "--kv-transfer-config"))
    return parsed


def test_mooncake_names_each_side() -> None:
    built = plan(recipe())
    extra = {"mooncake_protocol": "tcp", "num_workers": 10}
    assert config(built, "prefill-0") == {
        "kv_connector": "MooncakeConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": extra,
        "kv_load_failure_policy": "fail",
    }
    assert config(built, "decode-0")["kv_role"] == "kv_consumer"


def test_mooncake_names_a_device_only_when_the_recipe_does() -> None:
    named = {**MOONCAKE, "protocol": "rdma", "device_name": "rdma0,rdma1"}
    built = plan(recipe({"prefill": {"connector": named}, "decode": {"connector": named}}))
    assert config(built, "prefill-0")["kv_connector_extra_config"] == {
        "mooncake_protocol": "rdma",
        "num_workers": 10,
        "device_name": "rdma0,rdma1",
    }


def test_multi_keeps_the_recipes_order_and_the_failure_policy_on_top() -> None:
    built = config(plan(recipe(with_lmcache())), "prefill-0")
    mooncake = {
        "kv_connector": "MooncakeConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"mooncake_protocol": "tcp", "num_workers": 10},
    }
    assert built == {
        "kv_connector": "MultiConnector",
        "kv_connector_module_path": "pdserve.connectors.multi",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"connectors": [mooncake, LMCACHE_CHILD]},
        "kv_load_failure_policy": "recompute",
    }


def test_no_child_has_an_engine_id_or_a_policy() -> None:
    built = config(plan(recipe(with_lmcache())), "prefill-0")
    for child in built["kv_connector_extra_config"]["connectors"]:
        assert not {"engine_id", "kv_load_failure_policy"} & child.keys()


def test_the_recipe_may_choose_the_failure_policy() -> None:
    built = plan(recipe({"decode": {"kv_load_failure_policy": "recompute"}}))
    assert config(built, "decode-0")["kv_load_failure_policy"] == "recompute"


def test_the_defaults_are_mooncake_and_lmcache_where_it_is_on() -> None:
    change = {"prefill": {"connector": None}, "decode": {"connector": None}}
    lmcache = {"lmcache": {"l1_size_gb": 1, "transfer_mode": "auto"}}
    built = plan(recipe(change, lmcache))
    children = config(built, "prefill-0")["kv_connector_extra_config"]["connectors"]
    assert [child["kv_connector"] for child in children] == ["MooncakeConnector", "LMCacheMPConnector"]
    assert config(built, "decode-0")["kv_connector"] == "MooncakeConnector"


def test_decode_gets_lmcache_only_when_it_opts_in() -> None:
    built = plan(recipe(with_lmcache(on=["prefill", "decode"]), {"decode": {"connector": MULTI}}))
    decode = config(built, "decode-0")
    assert decode["kv_role"] == "kv_consumer"
    assert [c["kv_role"] for c in decode["kv_connector_extra_config"]["connectors"]] == ["kv_consumer", "kv_both"]


@pytest.mark.parametrize(
    ("platform", "server", "engine", "asked"),
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


def test_one_server_a_rank_becomes_a_list_of_servers() -> None:
    built = plan(recipe(on_gpus(4, 1), with_lmcache(per="tp-rank")), *hosts(8))
    extra = config(built, "prefill-0")["kv_connector_extra_config"]["connectors"][1]["kv_connector_extra_config"]
    assert extra["lmcache.mp.server_urls"] == [f"tcp://127.0.0.1:{5555 + rank}" for rank in range(4)]
    assert not {"lmcache.mp.host", "lmcache.mp.port"} & extra.keys()


def test_nixl_names_each_side_because_both_is_deprecated() -> None:
    built = plan(recipe({"prefill": {"connector": NIXL}, "decode": {"connector": NIXL}}))
    assert config(built, "prefill-0") == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer",
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": 30},
        "kv_load_failure_policy": "fail",
    }
    assert config(built, "decode-0")["kv_role"] == "kv_consumer"


def test_nixl_on_a_gpu_leaves_the_buffer_to_vllm() -> None:
    change = {"prefill": {"connector": NIXL}, "decode": {"connector": NIXL}}
    assert "kv_buffer_device" not in config(plan(recipe(on_gpus(), change), *hosts(2)), "prefill-0")


def test_an_aggregated_engine_has_lmcache_alone() -> None:
    built = config(plan(recipe(aggregated())), "aggregated-0")
    assert built == {**LMCACHE_CHILD, "kv_load_failure_policy": "recompute"}


def test_an_aggregated_engine_without_lmcache_has_no_connector() -> None:
    built = plan(recipe(aggregated(connector=None), {"lmcache": None}))
    assert "--kv-transfer-config" not in built.process("aggregated-0").argv


RAW = {"kv_connector": "MooncakeConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"odd": 1}}


def test_a_raw_mapping_is_passed_as_it_is_and_marked() -> None:
    raw = {"kind": "raw", "config": RAW}
    built = plan(recipe({"prefill": {"connector": raw}, "decode": {"connector": raw}}))
    assert config(built, "prefill-0") == RAW
    assert [w for w in built.warnings if "prefill is raw: unverified" in w]
    assert built.proxy.protocol == "mooncake"


def test_a_raw_mapping_is_searched_for_its_classes() -> None:
    nested = {
        "kind": "raw",
        "config": {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [RAW, "nonsense"]}},
    }
    connector = recipe({"prefill": {"connector": nested}}).roles()[0][1].connector
    assert class_names(connector) == {"MultiConnector", "MooncakeConnector"}


@pytest.mark.parametrize(
    ("prefill", "decode", "message"),
    [
        (MOONCAKE, NIXL, "prefill: mooncake, decode: nixl"),
        (LMCACHE, MOONCAKE, "prefill: none, decode: mooncake"),
        ({"kind": "raw", "config": {"kv_connector": "OtherConnector"}}, MOONCAKE, "prefill: none"),
    ],
)
def test_roles_that_cannot_hand_over_kv_are_refused(
    prefill: dict[str, Any], decode: dict[str, Any], message: str
) -> None:
    change = {"prefill": {"connector": prefill}, "decode": {"connector": decode}}
    with pytest.raises(RecipeError, match=message):
        plan(recipe(with_lmcache(), change))


def test_lmcache_on_a_role_that_is_not_listed_is_refused() -> None:
    with pytest.raises(RecipeError, match="decode uses lmcache-mp, but no LMCache server is planned for it"):
        plan(recipe(with_lmcache(), {"decode": {"connector": MULTI}}))


def test_an_unused_lmcache_section_is_refused() -> None:
    with pytest.raises(RecipeError, match="no engine attaches to LMCache"):
        plan(recipe(with_lmcache(), {"prefill": {"connector": MOONCAKE}}))


def test_an_aggregated_engine_cannot_move_kv_to_anybody() -> None:
    with pytest.raises(RecipeError, match="an aggregated engine has neither"):
        plan(recipe(aggregated(connector=MOONCAKE), {"lmcache": None}))
