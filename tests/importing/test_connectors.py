"""Connectors of launches as sections of a recipe: MoRI-IO as it is published, and numbers that are texts at times."""

from __future__ import annotations

import json
from typing import Any

from pdserve.importing import connectors
from pdserve.importing.formats import import_launch
from pdserve.importing.launch import Draft, ImportChoice
from tests.importing.kit import notes
from tests.tables import each_row

PUBLISHED = {"proxy_ip": "10.0.0.1", "proxy_ping_port": "36367", "http_port": "2584", "read_mode": True}


def mapping(role: str, **extra: Any) -> dict[str, Any]:
    return {"kv_connector": "MoRIIOConnector", "kv_role": role, "kv_connector_extra_config": {**PUBLISHED, **extra}}


def test_addresses_and_ports_are_left_to_the_plan() -> None:
    carried = connectors.section_of(mapping("kv_consumer", qp_per_transfer="4", handshake_port="6301"))
    assert carried.section == {"kind": "moriio", "qp_per_transfer": 4}
    assert {key for key, _ in carried.replaced} == {
        "kv_role", "proxy_ip", "proxy_ping_port", "http_port", "handshake_port", "read_mode"
    }  # fmt: skip


def test_beside_lmcache_it_is_a_child() -> None:
    children = [mapping("kv_producer"), {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}]
    config = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"connectors": children},
    }
    section = connectors.section_of(config).section
    assert section == {"kind": "multi", "of": [{"kind": "moriio"}, {"kind": "lmcache-mp"}]}
    assert list(connectors.acceptances(section)) == [("of", 0, "accept_unsafe_aborts")]


def test_a_key_that_is_not_known_keeps_the_mapping_raw() -> None:
    assert connectors.needs_raw(mapping("kv_consumer", some_new_key=1))


def read(**extra: Any) -> Draft:
    config = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return import_launch(
        f"vllm serve org/model --kv-transfer-config '{json.dumps(config)}'\n", "serve.sh", ImportChoice()
    )


@each_row("size", [107374182400, "107374182400", " 107_374_182_400 ", 107374182400.0])
def test_host_memory_is_what_vllms_int_makes_of_it(size: Any) -> None:
    assert read(cpu_bytes_to_use=size).document["aggregated"]["connector"] == {"kind": "offloading", "cpu_gib": 100}


def test_other_counts_of_offloading_may_be_texts_too() -> None:
    connector = read(cpu_bytes_to_use=1 << 30, blocks_per_chunk="4", store_threshold="2").document["aggregated"]
    assert connector["connector"] == {"kind": "offloading", "cpu_gib": 1, "blocks_per_chunk": 4, "store_threshold": 2}


@each_row("size", ["100GB", "1e11", "", None, True, [1], {"a": 1}, float("inf"), 10**400, "9" * 5000])
def test_host_memory_that_is_no_number_stays_as_it_is_and_is_listed(size: Any) -> None:
    draft = read(cpu_bytes_to_use=size)
    connector = draft.document["aggregated"]["connector"]
    assert connector["kind"] == "raw"
    assert connector["config"]["kv_connector_extra_config"] == {"cpu_bytes_to_use": size}
    (why,) = (why for key, why in notes(draft, "confirm").items() if key.endswith("cpu_bytes_to_use"))
    assert why.endswith("is no number of bytes, and vLLM would not start: correct it")
