"""A Mooncake store in a plan: the master, what its engines get, and what it takes of a node."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdserve.plan.model import Plan
from pdserve.recipe.model import Recipe
from tests.plan.kit import MOONCAKE, NIXL, aggregated, hosts, on_gpus, plan, recipe, value_of

GIB = 1 << 30
STORE: dict[str, Any] = {"kind": "mooncake-store"}


def with_store(**section: Any) -> dict[str, Any]:
    """A store beside Mooncake on prefill."""
    return {
        "prefill": {"connector": {"kind": "multi", "of": [MOONCAKE, STORE]}},
        "mooncake_store": {"segment_gib": 2, "buffer_gib": 0.5, "protocol": "tcp", **section},
    }


def alone(**section: Any) -> Recipe:
    """An aggregated engine with the store and nothing else."""
    return recipe(
        aggregated(connector=STORE),
        {"lmcache": None, "mooncake_store": {"segment_gib": 2, "protocol": "tcp", **section}},
    )


def child(built: Plan, process: str) -> dict[str, Any]:
    config = json.loads(value_of(built.process(process), "--kv-transfer-config"))
    children: list[dict[str, Any]] = config["kv_connector_extra_config"]["connectors"]
    return next(entry for entry in children if entry["kv_connector"] == "MooncakeStoreConnector")


def test_one_master_on_the_first_node_is_ready_before_any_engine() -> None:
    built = plan(recipe(on_gpus(8, 8), with_store(protocol="rdma"), both_rdma()), *hosts(8, 8))
    master = built.process("mooncake-master")
    assert (master.role, master.node) == ("mooncake-master", "host0")
    assert all(master.start_stage < process.start_stage for process in built.processes if process.is_engine)
    assert all(master.stop_stage > process.stop_stage for process in built.processes if process.is_engine)


def both_rdma() -> dict[str, Any]:
    named = {"kind": "mooncake", "protocol": "rdma"}
    return {
        "prefill": {"connector": {"kind": "multi", "of": [named, STORE]}},
        "decode": {"connector": named},
    }


def test_the_master_listens_where_its_engines_are_and_shows_its_figures_on_loopback_only() -> None:
    master = plan(recipe(with_store())).process("mooncake-master")
    assert master.argv == (
        *("python", "-m", "mooncake.cli"),
        *("-rpc_address=127.0.0.1", "-rpc_port=5051", "-metrics_host=127.0.0.1", "-metrics_port=9003"),
        "-enable_metric_reporting=false",
    )
    assert master.ports == {"rpc": 5051, "http": 9003}
    assert master.env.base == "allow"
    assert master.packages == ("mooncake",)


def test_flags_of_the_recipe_come_last_as_gflags_reads_them() -> None:
    master = plan(recipe(with_store(extra_args={"eviction_ratio": 0.1, "enable_offload": True}))).process(
        "mooncake-master"
    )
    assert master.argv[-2:] == ("-eviction_ratio=0.1", "-enable_offload=true")


@pytest.mark.parametrize(("on_death", "policy"), [("restart", "on-failure"), ("fail", "never")])
def test_its_death_is_what_the_recipe_says(on_death: str, policy: str) -> None:
    assert plan(recipe(with_store(on_death=on_death))).process("mooncake-master").restart.policy == policy


def test_an_engine_finds_the_master_in_a_file_of_its_own() -> None:
    prefill = plan(recipe(with_store())).process("prefill-0")
    assert prefill.env.set["MOONCAKE_CONFIG_PATH"] == "/run/pdserve/test/mooncake-store-prefill-0.json"
    assert json.loads(prefill.files["mooncake-store-prefill-0.json"]) == {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": "127.0.0.1:5051",
        "protocol": "tcp",
        "device_name": "",
        "mode": "embedded",
        "global_segment_size": 2 * GIB,
        "local_buffer_size": GIB // 2,
    }


def test_an_engine_on_another_node_finds_it_at_the_address_of_the_first() -> None:
    built = plan(recipe(on_gpus(8, 8), both_rdma(), {"mooncake_store": {"segment_gib": 2}}, swapped()), *hosts(8, 8))
    engine = next(p for p in built.processes if p.is_engine and p.node == "host1")
    (content,) = engine.files.values()
    assert json.loads(content)["master_server_address"] == "192.0.2.1:5051"


def swapped() -> dict[str, Any]:
    """The store on decode too, which is on the second node."""
    named = {"kind": "mooncake", "protocol": "rdma"}
    return {"decode": {"connector": {"kind": "multi", "of": [named, STORE]}}}


def test_an_engine_without_the_store_gets_none_of_it() -> None:
    decode = plan(recipe(with_store())).process("decode-0")
    assert decode.files == {}
    assert "MOONCAKE_CONFIG_PATH" not in decode.env.set
    assert decode.host_bytes == 0


def test_a_child_names_its_own_side_and_recomputes_what_the_pool_has_lost() -> None:
    built = plan(recipe(with_store()))
    assert child(built, "prefill-0") == {
        "kv_connector": "MooncakeStoreConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"load_async": True, "lookup_async": True, "save_decode_cache": False},
    }
    config = json.loads(value_of(built.process("prefill-0"), "--kv-transfer-config"))
    assert config["kv_load_failure_policy"] == "recompute"
    assert "--enable-prefix-caching" in built.process("prefill-0").argv


def test_alone_it_serves_an_aggregated_engine() -> None:
    engine = plan(alone()).process("aggregated-0")
    config = json.loads(value_of(engine, "--kv-transfer-config"))
    assert (config["kv_connector"], config["kv_role"]) == ("MooncakeStoreConnector", "kv_both")
    assert engine.port_ranges["transfer"].first == 15000
    assert engine.env.set["MC_FORCE_TCP"] == "1"


def test_beside_nixl_it_has_the_transfer_ports_and_nixl_its_own() -> None:
    change = {"prefill": {"connector": {"kind": "multi", "of": [NIXL, STORE]}}, "decode": {"connector": NIXL}}
    prefill = plan(recipe(with_store(), change)).process("prefill-0")
    assert prefill.ports["nixl"] == 5600
    assert (prefill.env.set["MC_MIN_RPC_PORT"], prefill.env.set["MC_MAX_RPC_PORT"]) == ("15000", "15099")


def test_mooncake_and_the_store_share_one_range_of_a_process() -> None:
    prefill = plan(recipe(with_store())).process("prefill-0")
    assert (prefill.port_ranges["transfer"].first, prefill.port_ranges["transfer"].last) == (15000, 15099)
    assert "prefill" in prefill.reached_by["transfer"]


def test_each_worker_takes_its_segment_and_its_buffer() -> None:
    built = plan(recipe(on_gpus(4, 1), both_rdma(), {"mooncake_store": {"segment_gib": 2, "buffer_gib": 1}}))
    assert built.process("prefill-0").host_bytes == 4 * 3 * GIB
    assert built.process("prefill-0").shm_bytes == 0


def test_what_is_open_without_a_key_is_listed() -> None:
    opened = {
        (entry.process, entry.address, entry.port)
        for entry in plan(recipe(with_store())).exposed
        if entry.process == "mooncake-master"
    }
    assert opened == {("mooncake-master", "127.0.0.1", 5051), ("mooncake-master", "127.0.0.1", 9003)}


def test_a_raw_store_connector_gets_the_file_where_the_recipe_has_the_section() -> None:
    store = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
    mooncake = {"kv_connector": "MooncakeConnector", "kv_role": "kv_both"}
    both = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [mooncake, store]}}
    change = {
        "prefill": {"connector": {"kind": "raw", "config": both}},
        "decode": {"connector": {"kind": "raw", "config": mooncake}},
    }
    managed = plan(recipe(with_store(), change)).process("prefill-0")
    assert "mooncake-store-prefill-0.json" in managed.files
    own = plan(recipe(change, {"prefill": {"env": {"MOONCAKE_CONFIG_PATH": "/etc/store.json"}}}))
    assert own.process("prefill-0").env.set["MOONCAKE_CONFIG_PATH"] == "/etc/store.json"
    assert "mooncake-master" not in own.names()


def test_a_decode_can_give_memory_to_the_pool_without_asking_it() -> None:
    giving = {"kind": "multi", "of": [MOONCAKE, {**STORE, "lookup": False}]}
    built = plan(recipe(with_store(), {"decode": {"connector": giving}}))
    assert child(built, "decode-0")["kv_role"] == "kv_consumer"
    assert child(built, "decode-0")["kv_connector_extra_config"]["enable_lookup"] is False
    assert "enable_lookup" not in child(built, "prefill-0")["kv_connector_extra_config"], "vLLM's default: it asks"
