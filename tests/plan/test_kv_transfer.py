"""Connectors beyond the golden plans: transfer modes, defaults, and roles that cannot hand over KV."""

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
    plan,
    recipe,
    value_of,
    with_lmcache,
)
from tests.plan.shapes import RAW, shape
from tests.tables import each_row


def config(built: Plan, process: str) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(value_of(built.process(process), "--kv-transfer-config"))
    return parsed


def test_the_defaults_are_mooncake_and_lmcache_where_it_is_on() -> None:
    change = {"prefill": {"connector": None}, "decode": {"connector": None}}
    lmcache = {"lmcache": {"l1_size_gb": 1, "transfer_mode": "auto"}}
    built = plan(recipe(change, lmcache))
    children = config(built, "prefill-0")["kv_connector_extra_config"]["connectors"]
    assert [child["kv_connector"] for child in children] == ["MooncakeConnector", "LMCacheMPConnector"]
    assert config(built, "decode-0")["kv_connector"] == "MooncakeConnector"


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


def test_a_raw_mapping_is_passed_as_it_is() -> None:
    assert config(shape("raw"), "prefill-0") == RAW


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
