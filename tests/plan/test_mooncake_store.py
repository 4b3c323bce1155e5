"""A Mooncake store beyond the golden plans of shipped recipes: without it, and with raw connectors."""

from __future__ import annotations

from typing import Any

from tests.plan.kit import MOONCAKE, plan, recipe
from tests.plan.shapes import STORE

GIB = 1 << 30


def with_store(**section: Any) -> dict[str, Any]:
    """A store beside Mooncake on prefill."""
    return {
        "prefill": {"connector": {"kind": "multi", "of": [MOONCAKE, STORE]}},
        "mooncake_store": {"segment_gib": 2, "buffer_gib": 0.5, "protocol": "tcp", **section},
    }


def test_mooncake_and_the_store_share_one_range_of_a_process_and_one_without_it_gets_none_of_it() -> None:
    built = plan(recipe(with_store()))
    prefill, decode = built.process("prefill-0"), built.process("decode-0")
    assert (prefill.port_ranges["transfer"].first, prefill.port_ranges["transfer"].last) == (15000, 15099)
    assert "prefill" in prefill.reached_by["transfer"]
    assert (decode.files, decode.host_bytes) == ({}, 0)
    assert "MOONCAKE_CONFIG_PATH" not in decode.env.set


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
