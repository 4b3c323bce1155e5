"""How many heads of KV a model has and how large one is: the one place that reads these keys of a config.json.

vLLM's get_total_num_kv_heads and get_head_size (transformers_utils/model_arch_config_convertor.py) name the keys and
their order. Where a model's own class makes something else of them (chatglm.py, falcon.py), the class counts: it makes
the KV cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdserve.models.unknown import UnknownModelError

_KV_HEADS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups")
"""In vLLM's order: Falcon, Llama, ChatGLM, Step3p5."""
_FALCON = frozenset({"falcon", "RefinedWeb", "RefinedWebModel"})
_HEAD_SIZES = ("head_dim", "hidden_size_per_head", "attention_head_dim")
"""PLaMo has the second, Zamba2 the third."""
_MLA = frozenset({"axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2", "pangu_ultra_moe"})
"""Of vLLM's is_deepseek_mla those whose layers are all alike. The others keep an index or a state beside the latent
vector, or have two attentions in a layer. What is not on its list (MiniCPM3) keeps K and V in spite of the key."""


def kv_heads_of(text: Mapping[str, Any]) -> int:
    """Over all TP ranks. Raises UnknownModelError."""
    _refuse_unequal(text)
    model, heads = text.get("model_type"), number_of(text, "num_attention_heads")
    if model in _FALCON:
        return _falcon_heads(text, heads)
    if model == "chatglm" and not text.get("multi_query_attention"):
        return heads
    return next((int(text[key]) for key in _KV_HEADS if text.get(key)), heads)


def head_size_of(text: Mapping[str, Any]) -> int:
    """Of K and of V alike. Raises UnknownModelError."""
    stated = next((int(text[key]) for key in _HEAD_SIZES if text.get(key)), 0)
    size = stated or number_of(text, "hidden_size") // number_of(text, "num_attention_heads")
    if not size:
        raise UnknownModelError("its hidden_size is less than its num_attention_heads")
    for key in ("global_head_dim", "num_global_key_value_heads", "v_head_dim"):
        if text.get(key) and text[key] != size:  # 0 is that of DeepSeek-OCR, which has none
            raise UnknownModelError(f"its layers keep KV of different sizes ({key})")
    return size


def latent_size_of(text: Mapping[str, Any]) -> int:
    """Of the one vector that MLA keeps of a token; 0: the model keeps K and V. Raises UnknownModelError."""
    if not text.get("kv_lora_rank"):
        return 0
    if text.get("index_topk"):
        raise UnknownModelError("sparse MLA keeps an index beside its KV, whose size is not known here")
    if (model := text.get("model_type")) not in _MLA:
        raise UnknownModelError(f"what {model!r} models keep, which have a kv_lora_rank, is not known here")
    return int(text["kv_lora_rank"]) + number_of(text, "qk_rope_head_dim")


def number_of(text: Mapping[str, Any], key: str) -> int:
    """A size that must be there. Raises UnknownModelError."""
    value = text.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise UnknownModelError(f"its config.json has no usable {key}")
    return value


def _falcon_heads(text: Mapping[str, Any], heads: int) -> int:
    """multi_query is on where the config.json does not state it: transformers' FalconConfig."""
    if text.get("new_decoder_architecture"):
        return next((int(text[key]) for key in ("num_kv_heads", "n_head_kv") if text.get(key)), heads)
    return 1 if text.get("multi_query", True) else heads


def _refuse_unequal(text: Mapping[str, Any]) -> None:
    """Layers that differ by a key of their own."""
    if text.get("block_configs"):
        raise UnknownModelError("its layers differ (block_configs), and what each of them keeps is not known here")
    other = text.get("attention_other_setting")  # of Step3p5: layers with a window have other heads
    if isinstance(other, Mapping):
        for key, same in (("num_attention_groups", text.get("num_attention_groups")), ("head_dim", head_size_of(text))):
            if other.get(key) and other[key] != same:
                raise UnknownModelError(f"its layers keep KV of different sizes (attention_other_setting.{key})")
