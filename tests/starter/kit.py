"""Models of any size that take no disk: a config.json, and a file of safetensors whose data are a hole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

GIB = 1 << 30
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 8192,
    "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 40960, "torch_dtype": "bfloat16",
}  # fmt: skip


def model(folder: Path, gib: int, **changes: Any) -> Path:
    """A model of `gib` GiB that tensor parallelism can cut."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    entry = {"dtype": "BF16", "shape": [gib, GIB // 2], "data_offsets": [0, gib * GIB]}
    header = json.dumps({"model.layers.0.mlp.down_proj.weight": entry}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + gib * GIB)
    return folder
