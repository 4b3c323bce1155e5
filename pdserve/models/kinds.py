"""The KV of a model by its config.json: one kind of layers or several, and whether some keep recurrent state.

The keys are those that vLLM looks at (config/model.py: layer_types, layers_block_type, attn_type_list; the text config
below a multimodal one) and those by which its hybrid models mark recurrent layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from pdserve.models.config_json import texts

_FULL = frozenset(
    {"full_attention", "attention", "indexed_attention", "deepseek_sparse_attention", "minimax_m3_sparse"}
)
_WINDOW = frozenset({"sliding_attention", "chunked_attention", "local_attention"})
_COMPRESSED = frozenset({"compressed_sparse_attention", "heavily_compressed_attention"})
_RECURRENT = frozenset({"linear_attention", "mamba", "mamba2", "conv", "recurrent"})
_MIXED: Mapping[str, tuple[str, ...]] = {"hybrid": ("full", "recurrent"), "hybrid_sliding": ("window", "recurrent")}
_NOTHING = frozenset({"mlp", "moe", "dense", "sparse"})
"""Layers that keep no KV."""
INTERLEAVED = frozenset(
    {
        *("gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "gemma4", "gemma4_text"),
        *("cohere2", "gpt_oss", "step3p5"),
    }
)
"""Models that mix windows and full attention although their config.json may name the window alone."""
STATE_KEYS = ("mamba_d_state", "mamba_num_heads", "mamba_d_ssm", "mamba_d_conv", "ssm_cfg", "state_size")
_BESIDE_ATTENTION = ("linear_attn_config", "full_attention_interval", "attn_layer_period", "attn_layer_indices")


@dataclass(frozen=True)
class KvHints:
    """What the config shows of the KV of its layers."""

    kinds: frozenset[str]
    """Kinds of layers that keep KV: full, window, compressed, recurrent, unknown."""
    key: str
    """The key of the config that shows it, for messages; empty: no key is about kinds."""

    @property
    def several(self) -> bool:
        """vLLM makes a KV cache group of each kind at least, unless its hybrid KV cache manager is off."""
        return len(self.kinds - {"unknown"}) > 1 or "compressed" in self.kinds

    @property
    def recurrent(self) -> bool:
        return "recurrent" in self.kinds


def hints_of(config: Mapping[str, Any]) -> KvHints:
    """The hints of a config.json. A config that names no kinds of layers has one: full attention."""
    hints = next((hint for text in texts(config) for hint in _hints(text)), None)
    return hints or KvHints(frozenset({"full"}), "")


def _hints(text: Mapping[str, Any]) -> Iterator[KvHints]:
    """Most specific first."""
    if text.get("compress_ratios"):
        yield KvHints(frozenset({"compressed"}), "compress_ratios")
    for key in ("layer_types", "layers_block_type"):
        if _is_list(text.get(key)):
            yield KvHints(frozenset(_kinds(text[key], text)), key)
    if _is_list(kinds := text.get("attn_type_list")):
        yield KvHints(frozenset("full" if kind == 1 else "recurrent" for kind in kinds), "attn_type_list")
    if isinstance(pattern := text.get("hybrid_override_pattern"), str):
        letters = {"M": "recurrent", "*": "full"}
        yield KvHints(frozenset(letters[letter] for letter in pattern if letter in letters), "hybrid_override_pattern")
    for key in _BESIDE_ATTENTION:
        if text.get(key):
            yield KvHints(frozenset({"full", "recurrent"}), key)
    for key in STATE_KEYS:
        if text.get(key):
            yield KvHints(frozenset({"recurrent", *(("full",) if text.get("num_attention_heads") else ())}), key)
    yield from _windows(text)


def _windows(text: Mapping[str, Any]) -> Iterator[KvHints]:
    model = str(text.get("model_type", ""))
    # vLLM drops the attention_chunk_size of MiMo: it means something else there.
    if text.get("attention_chunk_size") and not model.startswith("mimo"):
        # Llama 4: layers without rotary embedding attend to everything.
        mixed = model.startswith("llama4") or bool(text.get("no_rope_layers"))
        yield KvHints(frozenset({"window", *(("full",) if mixed else ())}), "attention_chunk_size")
    if has_window(text):
        pattern = text.get("sliding_window_pattern", text.get("_sliding_window_pattern"))
        mixed = pattern not in (None, 1) or model in INTERLEAVED
        yield KvHints(frozenset({"window", *(("full",) if mixed else ())}), "sliding_window")


def has_window(text: Mapping[str, Any]) -> bool:
    """Whether there is a window, and it is not turned off."""
    return bool(text.get("sliding_window")) and text.get("use_sliding_window") is not False


def kind_of(layer: object, text: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The kinds of KV of a layer of this type; None: it keeps none. A window that is turned off is full attention."""
    windows = bool(text.get("sliding_window") or text.get("attention_chunk_size"))
    windows = windows and text.get("use_sliding_window") is not False
    if layer in _NOTHING:
        return None
    if isinstance(layer, str) and layer in _MIXED:
        return _MIXED[layer]
    if layer in _FULL or (layer in _WINDOW and not windows):
        return ("full",)
    if layer in _WINDOW:
        return ("window",)
    return ("compressed",) if layer in _COMPRESSED else ("recurrent",) if layer in _RECURRENT else ("unknown",)


def _kinds(layers: Sequence[Any], text: Mapping[str, Any]) -> Iterator[str]:
    for layer in layers:
        yield from kind_of(layer, text) or ()


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str) and bool(value)
