"""The layers of a model by its config.json: which keep KV of every token, of a window, or a state, and how much.

The rules are those of vLLM 0.32's model classes; tests/upstream/test_model_kv.py compares. A model whose layers are not
known is refused with the reason: a number for another architecture would look as good as the right number.

Heads: vLLM's get_total_num_kv_heads and get_head_size (transformers_utils/model_arch_config_convertor.py) name the keys
and their order. Where a model's own class makes something else of them (chatglm.py, falcon.py), the class counts: it
makes the KV cache.

Kinds: The keys are those that vLLM looks at (config/model.py: layer_types, layers_block_type, attn_type_list; the text
config below a multimodal one) and those by which its hybrid models mark recurrent layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

from pdserve.models.config_json import UnknownModelError, texts

_FULL = frozenset(
    {"full_attention", "attention", "indexed_attention", "deepseek_sparse_attention", "minimax_m3_sparse"}
)
_WINDOW = frozenset({"sliding_attention", "chunked_attention", "local_attention"})
_COMPRESSED_KINDS = frozenset({"compressed_sparse_attention", "heavily_compressed_attention"})
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
    """The kinds of KV that a config.json shows."""

    kinds: frozenset[str]
    """Kinds of layers that keep KV: full, window, compressed, recurrent, unknown."""
    key: str
    """The key of the config that shows it, for messages; empty: no key is about kinds."""

    @property
    def several(self) -> bool:
        """Tell whether there are several KV cache groups: vLLM makes one of each kind at least, unless its hybrid KV
        cache manager is off."""
        return len(self.kinds - {"unknown"}) > 1 or "compressed" in self.kinds

    @property
    def recurrent(self) -> bool:
        return "recurrent" in self.kinds


def hints_of(config: Mapping[str, Any]) -> KvHints:
    """Return the hints of a config.json. A config that names no kinds of layers has one: full attention."""
    hints = next((hint for text in texts(config) for hint in _hints(text)), None)
    return hints or KvHints(frozenset({"full"}), "")


def _hints(text: Mapping[str, Any]) -> Iterator[KvHints]:
    """Yield hints of a model's kinds of layers, the most specific first."""
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
    yield from _window_hints(text)


def _window_hints(text: Mapping[str, Any]) -> Iterator[KvHints]:
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
    """Return whether there is a window, and it is not turned off."""
    return bool(text.get("sliding_window")) and text.get("use_sliding_window") is not False


def kind_of(layer: object, text: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the kinds of KV of a layer of this type; None: it keeps none. A window that is turned off is full
    attention."""
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
    return ("compressed",) if layer in _COMPRESSED_KINDS else ("recurrent",) if layer in _RECURRENT else ("unknown",)


def _kinds(layers: Sequence[Any], text: Mapping[str, Any]) -> Iterator[str]:
    for layer in layers:
        yield from kind_of(layer, text) or ()


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str) and bool(value)


_KV_HEADS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups")
"""In vLLM's order: Falcon, Llama, ChatGLM, Step3p5."""
_FALCON = frozenset({"falcon", "RefinedWeb", "RefinedWebModel"})
_HEAD_SIZES = ("head_dim", "hidden_size_per_head", "attention_head_dim")
"""PLaMo has the second, Zamba2 the third."""
_MLA = frozenset({"axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2", "pangu_ultra_moe"})
"""Of vLLM's is_deepseek_mla those whose layers are all alike. The others keep an index or a state beside the latent
vector, or have two attentions in a layer. What is not on its list (MiniCPM3) keeps K and V in spite of the key."""


def kv_heads_of(text: Mapping[str, Any]) -> int:
    """Return the heads of KV over all TP ranks. Raises UnknownModelError."""
    _refuse_unequal(text)
    model, heads = text.get("model_type"), number_of(text, "num_attention_heads")
    if model in _FALCON:
        return _falcon_heads(text, heads)
    if model == "chatglm" and not text.get("multi_query_attention"):
        return heads
    return next((int(text[key]) for key in _KV_HEADS if text.get(key)), heads)


def head_size_of(text: Mapping[str, Any]) -> int:
    """Return the size of a head, of K and of V alike. Raises UnknownModelError."""
    stated = next((int(text[key]) for key in _HEAD_SIZES if text.get(key)), 0)
    size = stated or number_of(text, "hidden_size") // number_of(text, "num_attention_heads")
    if not size:
        raise UnknownModelError("its hidden_size is less than its num_attention_heads")
    for key in ("global_head_dim", "num_global_key_value_heads", "v_head_dim"):
        if text.get(key) and text[key] != size:  # 0 is that of DeepSeek-OCR, which has none
            raise UnknownModelError(f"its layers keep KV of different sizes ({key})")
    return size


def latent_size_of(text: Mapping[str, Any]) -> int:
    """Return the size of the one vector that MLA keeps of a token; 0: the model keeps K and V. Raises
    UnknownModelError."""
    if not text.get("kv_lora_rank"):
        return 0
    if text.get("index_topk"):
        raise UnknownModelError("sparse MLA keeps an index beside its KV, whose size is not known here")
    if (model := text.get("model_type")) not in _MLA:
        raise UnknownModelError(f"what {model!r} models keep, which have a kv_lora_rank, is not known here")
    return int(text["kv_lora_rank"]) + number_of(text, "qk_rope_head_dim")


def number_of(text: Mapping[str, Any], key: str) -> int:
    """Return a size that must be there. Raises UnknownModelError."""
    value = text.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise UnknownModelError(f"its config.json has no usable {key}")
    return value


def _falcon_heads(text: Mapping[str, Any], heads: int) -> int:
    """Return the KV heads of a Falcon model. multi_query is on where the config.json does not state it: transformers'
    FalconConfig."""
    if text.get("new_decoder_architecture"):
        return next((int(text[key]) for key in ("num_kv_heads", "n_head_kv") if text.get(key)), heads)
    return 1 if text.get("multi_query", True) else heads


def _refuse_unequal(text: Mapping[str, Any]) -> None:
    """Refuse layers that differ by a key of their own."""
    if text.get("block_configs"):
        raise UnknownModelError("its layers differ (block_configs), and what each of them keeps is not known here")
    other = text.get("attention_other_setting")  # of Step3p5: layers with a window have other heads
    if isinstance(other, Mapping):
        for key, same in (("num_attention_groups", text.get("num_attention_groups")), ("head_dim", head_size_of(text))):
            if other.get(key) and other[key] != same:
                raise UnknownModelError(f"its layers keep KV of different sizes (attention_other_setting.{key})")


_MAMBA2 = frozenset({"granitemoehybrid", "bamba", "nemotron_h"})
_LARGEST_SIZE = 1 << 40
_GATED_DELTA = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe"})


@dataclass(frozen=True)
class State:
    """Describes the state of a layer: a convolution's last inputs, and the state proper."""

    channels: int
    """The channels of the convolution."""
    group_channels: int
    """The channels of the convolution for each group; a group that spans ranks is held by each of them."""
    groups: int
    kernel: int
    heads: int
    head_elements: int
    keeps_drafts: bool
    """Whether the convolution keeps the inputs of drafted tokens too."""
    checkpoints: int
    """Blocks that a request holds for states inside its prompt, beside the two of every request."""
    dtype: str | None
    """The dtype of the state proper, as the config.json or the model class asks; None: that of the convolution."""

    def convolution(self, tp: int, drafts: int) -> int:
        """Return the elements that one rank keeps. `drafts`: tokens that are drafted in a step."""
        extra = 0 if not self.groups or self.groups % tp == 0 else tp - self.groups
        channels = self.channels + self.group_channels * (self.groups + extra)
        return channels // tp * (self.kernel - 1 + (drafts if self.keeps_drafts else 0))

    def recurrent(self, tp: int) -> int:
        """Return the elements of the state proper that one rank keeps."""
        return self.heads // tp * self.head_elements


def state_of(text: Mapping[str, Any]) -> State | None:
    """Return the state of a layer of this text config; None: its kind is not known, or a key is missing."""
    model = str(text.get("model_type", ""))
    try:
        return _state(model, text)
    except KeyError:
        return None


def _state(model: str, text: Mapping[str, Any]) -> State | None:
    def of(key: str) -> int:
        """Return a number of the configuration. These keys mean other things in other models, so config_json.py leaves
        them alone."""
        value = text.get(key)
        if type(value) is not int or not 0 < value <= _LARGEST_SIZE:
            raise KeyError(key)
        return value

    if model == "jamba":
        inner = of("mamba_expand") * of("hidden_size")
        return State(inner, 0, 0, of("mamba_d_conv"), inner, of("mamba_d_state"), False, 0, None)
    if model == "nemotron_h":
        heads, size, state = of("mamba_num_heads"), of("mamba_head_dim"), of("ssm_state_size")
        wanted = text.get("mamba_ssm_cache_dtype", "float32")
        return State(heads * size, 2 * state, of("n_groups"), of("conv_kernel"), heads, size * state, True, 1, wanted)
    if model in _MAMBA2:
        heads, size, state = of("mamba_n_heads"), of("mamba_d_head"), of("mamba_d_state")
        inner = of("mamba_expand") * of("hidden_size")
        groups, kernel = of("mamba_n_groups"), of("mamba_d_conv")
        return State(inner, 2 * state, groups, kernel, heads, size * state, True, 1, None)
    if model in _GATED_DELTA:
        key, value = of("linear_key_head_dim"), of("linear_value_head_dim")
        heads = of("linear_num_value_heads")
        channels = 2 * key * of("linear_num_key_heads") + value * heads
        kernel = of("linear_conv_kernel_dim")
        return State(channels, 0, 0, kernel, heads, value * key, True, 0, text.get("mamba_ssm_dtype"))
    return None


Keeps = Literal["full", "window", "chunk", "recurrent"]
_LETTERS: Mapping[str, Keeps] = {"M": "recurrent", "*": "full"}
"""Of hybrid_override_pattern; the others keep nothing."""


@dataclass(frozen=True)
class Layer:
    """A layer that keeps KV. A layer without any (an MLP between mamba layers) is left out."""

    index: int
    keeps: Keeps
    kv_heads: int = 0
    """Over all TP ranks. MLA: one latent vector, which every rank holds whole."""
    head_size: int = 0
    value_size: int = 0
    """0: MLA, which keeps no V."""
    reach: int = 0
    """Tokens of the window or of the chunk."""
    state: State | None = None

    @property
    def latent(self) -> bool:
        """Tell whether the layer keeps latent KV (MLA)."""
        return self.state is None and self.value_size == 0

    def elements(self, tp: int) -> int:
        """Return the numbers that one rank keeps of one token."""
        heads = 1 if self.latent else max(1, self.kv_heads // tp)
        return heads * (self.head_size + self.value_size)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config.json that describes the language model."""
    return next(text for text in texts(config) if "num_hidden_layers" in text or text is config)


def layers_of(config: Mapping[str, Any], *, drafts: bool = False) -> tuple[Layer, ...]:
    """Return the layers that keep KV. `drafts`: those of the model's own MTP modules too, as when it drafts for itself.

    Raises UnknownModelError.
    """
    text = text_config(config)
    number = number_of(text, "num_hidden_layers")
    named = list(_keeps(text, number))
    if drafts:
        # vLLM appends them: attention over everything, as in the last full layers of the model.
        modules = text.get("num_nextn_predict_layers") or text.get("mtp_num_hidden_layers") or 0
        if not modules:
            raise UnknownModelError("its config.json names no MTP modules (num_nextn_predict_layers)")
        if len(text.get("layer_types") or ()) > number:
            raise UnknownModelError("what its MTP modules keep is not known here (layer_types)")
        named += ["full"] * modules
    return tuple(_layer(text, index, keeps) for index, keeps in enumerate(named) if keeps is not None)


def _layer(text: Mapping[str, Any], index: int, keeps: Keeps) -> Layer:
    if keeps == "recurrent":
        state = state_of(text)
        if state is None:
            raise UnknownModelError(f"the recurrent state of {text.get('model_type')!r} models is not known here")
        return Layer(index, keeps, state=state)
    reach = {"window": "sliding_window", "chunk": "attention_chunk_size"}.get(keeps)
    window = number_of(text, reach) if reach else 0
    if latent := latent_size_of(text):
        return Layer(index, keeps, 1, latent, reach=window)
    size = head_size_of(text)
    return Layer(index, keeps, kv_heads_of(text), size, size, reach=window)


def _keeps(text: Mapping[str, Any], number: int) -> Iterator[Keeps | None]:
    """Yield what each layer keeps; None: it keeps nothing."""
    model = str(text.get("model_type", ""))
    if text.get("compress_ratios"):
        raise UnknownModelError("compressed attention (compress_ratios) is not known here")
    if text.get("num_kv_shared_layers"):
        raise UnknownModelError("some of its layers use the KV of others (num_kv_shared_layers)")
    if isinstance(pattern := text.get("hybrid_override_pattern"), str):
        yield from (_LETTERS.get(letter) for letter in pattern)
        return
    named = text.get("layer_types") or text.get("layers_block_type")
    if isinstance(named, Sequence) and not isinstance(named, str):
        if len(named) < number:
            raise UnknownModelError(f"its config.json names the kinds of {len(named)} layers, and it has {number}")
        yield from (_kind_by_name(kind, text) for kind in named[:number])  # what follows are MTP modules (Step3p5)
        return
    if text.get("attn_type_list") or text.get("linear_attn_config") or model in ("falcon_h1", "zamba2"):
        raise UnknownModelError(f"which layers of {model!r} models keep what is not known here")
    if interval := text.get("full_attention_interval"):
        yield from _full_where(((index + 1) % interval == 0 for index in range(number)), "recurrent")
    elif period := text.get("attn_layer_period"):
        offset = text.get("attn_layer_offset", 0)
        yield from _full_where((index % period == offset for index in range(number)), "recurrent")
    elif text.get("attention_chunk_size") and not model.startswith("mimo"):
        rope = text.get("no_rope_layers") or [(index + 1) % 4 for index in range(number)]
        if len(rope) < number:
            raise UnknownModelError(f"its no_rope_layers has {len(rope)} entries for {number} layers")
        yield from _full_where((not rope[index] for index in range(number)), "chunk")
    elif any(text.get(key) for key in STATE_KEYS):
        yield from _full_where([False] * number, "recurrent")
    elif has_window(text):
        yield from _windows(text, model, number)
    else:
        yield from _full_where([True] * number, "window")


def _windows(text: Mapping[str, Any], model: str, number: int) -> Iterator[Keeps]:
    pattern = text.get("sliding_window_pattern", text.get("_sliding_window_pattern"))
    if pattern is None and model in _PATTERNS:
        pattern = _PATTERNS[model]
    if text.get("use_sliding_window") and text.get("max_window_layers") not in (None, 0):
        raise UnknownModelError("only some of its layers have a window, and by a key of its own (max_window_layers)")
    if pattern is None and model in INTERLEAVED:
        raise UnknownModelError(
            f"its config.json does not state which layers have a window ({model!r} without layer_types)"
        )
    if not isinstance(pattern, int) or pattern <= 1:
        pattern = number + 1  # all of them
    yield from _full_where(((index + 1) % pattern == 0 for index in range(number)), "window")


def _full_where(full: Iterable[bool], others: Keeps) -> Iterator[Keeps]:
    for is_full in full:
        yield "full" if is_full else others


_PATTERNS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}
"""Every how many layers attention is full, where the config leaves it to the class."""


def _kind_by_name(kind: object, text: Mapping[str, Any]) -> Keeps | None:
    kept = kind_of(kind, text)
    if kept is None:
        return None
    if len(kept) > 1 or kept[0] not in ("full", "window", "recurrent"):
        raise UnknownModelError(f"what layers of the type {kind!r} keep is not known here")
    if kept[0] == "window":
        return "chunk" if kind == "chunked_attention" else "window"
    return "full" if kept[0] == "full" else "recurrent"
