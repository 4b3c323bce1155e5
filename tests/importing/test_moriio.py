"""Launches with MoRI-IO as they are published for MI355X: carried over, but for what only a user may write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.importing import connectors
from pdserve.importing.launch import ImportChoice
from pdserve.operations.import_recipe import import_file
from pdserve.recipe.load import yaml12

PUBLISHED = {"proxy_ip": "10.0.0.1", "proxy_ping_port": "36367", "http_port": "2584", "read_mode": True}


def mapping(role: str, **extra: Any) -> dict[str, Any]:
    return {"kv_connector": "MoRIIOConnector", "kv_role": role, "kv_connector_extra_config": {**PUBLISHED, **extra}}


def test_addresses_and_ports_are_left_to_the_plan() -> None:
    carried = connectors.carried(mapping("kv_consumer", qp_per_transfer="4", handshake_port="6301"))
    assert carried.section == {"kind": "moriio", "qp_per_transfer": 4}
    assert {key for key, _ in carried.replaced} == {
        "kv_role", "proxy_ip", "proxy_ping_port", "http_port", "handshake_port", "read_mode"
    }  # fmt: skip


def test_its_limits_are_left_to_the_section() -> None:
    """Those that are published are shorter than any request of ours."""
    carried = connectors.carried(mapping("kv_consumer", transfer_timeout=30))
    assert carried.section == {"kind": "moriio"}
    assert dict(carried.replaced)["transfer_timeout"] == "the section makes it from proxy.request_timeout_seconds"


def test_a_launch_in_write_mode_reads_here_and_the_import_says_so() -> None:
    config = mapping("kv_consumer")
    del config["kv_connector_extra_config"]["read_mode"]
    assert "no WRITE mode" in dict(connectors.carried(config).replaced)["read_mode"]


def test_beside_lmcache_it_is_a_child() -> None:
    children = [mapping("kv_producer"), {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}]
    config = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"connectors": children},
    }
    section = connectors.carried(config).section
    assert section == {"kind": "multi", "of": [{"kind": "moriio"}, {"kind": "lmcache-mp"}]}
    assert list(connectors.acceptances(section)) == [("of", 0, "accept_unsafe_aborts")]


def test_a_key_that_is_not_known_keeps_the_mapping_raw() -> None:
    assert connectors.needs_raw(mapping("kv_consumer", some_new_key=1))


@pytest.fixture
def launch(tmp_path: Path) -> Path:
    """A launch of srt-slurm on MI355X with two roles."""
    both = {
        role: {"kv-transfer-config": json.dumps(mapping(f"kv_{kv}")), "tensor-parallel-size": 8}
        for role, kv in (("prefill", "producer"), ("decode", "consumer"))
    }
    document = {
        "name": "moriio-1p1d",
        "model": {"path": "hf:org/small-model", "container": "registry.example/vllm:v1", "precision": "fp4"},
        "resources": {
            "gpu_type": "mi355x", "gpus_per_node": 8, "prefill_nodes": 1, "decode_nodes": 1,
            "prefill_workers": 1, "decode_workers": 1,
        },
        "backend": {"type": "vllm", "connector": None, "vllm_config": both},
        "frontend": {"type": "dynamo"},
    }  # fmt: skip
    path = tmp_path / "launch.yaml"
    path.write_text(yaml12.dump(document, 200))
    return path


def test_the_acceptance_is_not_written_for_the_user(launch: Path) -> None:
    recipe = import_file(launch, ImportChoice())
    document = yaml12.parse(recipe.text, "recipe.yaml").data
    assert document["decode"]["connector"] == document["prefill"]["connector"] == {"kind": "moriio"}
    asked = [note.why for note in recipe.draft.notes if note.effect == "confirm" and "accept_unsafe_aborts" in note.why]
    assert len(asked) == 2
    assert "the recipe is refused until you add accept_unsafe_aborts: true" in asked[0]
    assert "accept_unsafe_aborts: true" in recipe.text.partition("schema:")[0], "among the comments at its top"
