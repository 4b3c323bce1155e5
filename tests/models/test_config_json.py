"""Keys of a config.json with types that they have in no model are refused, with the key, the file and a fix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import PreflightError
from pdserve.models import files
from pdserve.models.config_json import UnknownModelError
from pdserve.models.kv_cache import KvFlags, kv_cache
from pdserve.models.layers import layers_of
from tests.models.tiny_configs import TINY
from tests.tables import each_row

LLAMA = next(tiny.config for tiny in TINY if tiny.name == "llama")


@each_row("key, value", [
    ("head_dim", "x"), ("head_dim", -4), ("num_key_value_heads", 8.5), ("num_hidden_layers", 10**30),
    ("num_hidden_layers", True), ("hidden_size", float("nan")), ("layer_types", [{"a": 1}, 2]),
    ("full_attention_interval", "4"), ("max_position_embeddings", "x"), ("_sliding_window_pattern", [1]),
    ("architectures", {"a": 1}),
])  # fmt: skip
@each_row("inner", ["", "text_config."])
def test_a_value_of_a_wrong_type_is_refused(tmp_path: Path, key: str, value: Any, inner: str) -> None:
    config = {**LLAMA, key: value}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config} if inner else config))
    with pytest.raises(PreflightError) as refused:
        files.config_in(tmp_path)
    assert refused.value.what.startswith(f"{inner}{key} of config.json is ")
    assert refused.value.where == str(tmp_path / "config.json")
    assert "fetch the model again" in str(refused.value.todo)


def test_configs_inside_each_other_without_end_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"text_config": ' * 150 + "{}" + "}" * 150)
    with pytest.raises(PreflightError, match="more than 4 configs inside each other"):
        files.config_in(tmp_path)


@each_row("change", [
    {"attention_chunk_size": 8, "no_rope_layers": [1]},
    {"hidden_size": 4, "num_attention_heads": 8, "num_key_value_heads": 8},
    {"model_type": "jamba", "layer_types": ["mamba"], "mamba_expand": None},
    {"model_type": "jamba", "layer_types": ["mamba"], "mamba_expand": 2, "mamba_d_conv": -4, "mamba_d_state": 16},
])  # fmt: skip
def test_sizes_that_give_no_layer_are_not_computed_with(change: dict[str, Any]) -> None:
    with pytest.raises(UnknownModelError):
        kv_cache(layers_of({**LLAMA, **change}), KvFlags(model_len=4096, block_size=16, kernel_block=16))
