"""What config.json files of real model families tell about their KV."""

from __future__ import annotations

from typing import Any

from pdserve.models.layers import hints_of
from tests.models.families import FAMILIES, Family
from tests.tables import each_row


@each_row("family", FAMILIES)
def test_families_that_vllm_serves(family: Family) -> None:
    assert hints_of(family.config).kinds == family.kinds


@each_row("config", [
    {"sliding_window": 4096, "use_sliding_window": False},
    {"sliding_window": None, "layer_types": ["sliding_attention", "full_attention"]},
    {"layer_types": ["attention", "attention"], "mamba_d_state": 128},
    {"attention_chunk_size": 128, "model_type": "mimo_v2_flash"},
    {"mtp_layer_types": ["sliding_attention"]},
])  # fmt: skip
def test_what_is_turned_off_or_means_something_else_is_no_second_kind(config: dict[str, Any]) -> None:
    hints = hints_of(config)
    assert hints.kinds == {"full"}
    assert not hints.several
    assert not hints.recurrent


def test_unknown_names_are_no_reason_to_refuse() -> None:
    hints = hints_of({"layer_types": ["full_attention", "quantum_attention"]})
    assert hints.kinds == {"full", "unknown"}
    assert not hints.several
