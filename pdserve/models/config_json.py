"""A model's config.json as it is read here: parsed once, with every key that this package computes with of its type.

The types are those of transformers' configuration classes. Whatever is not of them is refused here, so that no function
behind this one asks again whether a size is a number. Keys that are not read may hold anything.

A checkpoint's quantization decides the type of KV that kv-cache-dtype auto asks for. The rules are vLLM 0.32's:
_normalize_quantization_config (transformers_utils/model_arch_config_convertor.py), get_kv_cache_quant_algo_string
(utils/torch_utils.py), and for compressed-tensors the class Attention (model_executor/layers/attention/attention.py)
and CompressedTensorsKVCacheMethod.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from pdserve.errors import PreflightError


class UnknownModelError(Exception):
    """Says that a config.json does not allow to compute what is asked. The message is a clause: why."""


TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Keys of a config.json below which the config of its language model is."""
_DEEPEST = 4
"""Levels of them. Public models have two."""
_MOST_LAYERS = 10_000
_SHOWN = 60

_Size = Annotated[int, Field(ge=0, le=1 << 40)] | None
"""0 and null: the model does not have it."""
_Layers = Annotated[int, Field(ge=0, le=_MOST_LAYERS)] | None
_Names = Annotated[list[str], Field(max_length=_MOST_LAYERS)] | None
_Numbers = Annotated[list[int | bool], Field(max_length=_MOST_LAYERS)] | None


class _Text(BaseModel):
    """The keys that are read, of a language model or of the whole."""

    model_config = ConfigDict(strict=True)

    architectures: _Names = None
    model_type: str | None = None
    hidden_size: _Size = None
    max_position_embeddings: _Size = None
    num_hidden_layers: _Layers = None
    num_attention_heads: _Size = None
    num_key_value_heads: _Size = None
    num_kv_heads: _Size = None
    n_head_kv: _Size = None
    multi_query: bool | None = None
    multi_query_attention: bool | None = None
    multi_query_group_num: _Size = None
    new_decoder_architecture: bool | None = None
    num_attention_groups: _Size = None
    num_kv_shared_layers: _Layers = None
    head_dim: _Size = None
    attention_head_dim: _Size = None
    hidden_size_per_head: _Size = None
    global_head_dim: _Size = None
    num_global_key_value_heads: _Size = None
    v_head_dim: _Size = None
    kv_lora_rank: _Size = None
    qk_rope_head_dim: _Size = None
    layer_types: _Names = None
    layers_block_type: _Names = None
    attn_type_list: _Numbers = None
    hybrid_override_pattern: Annotated[str, Field(max_length=_MOST_LAYERS)] | None = None
    full_attention_interval: _Size = None
    attn_layer_period: _Size = None
    attn_layer_offset: _Size = None
    no_rope_layers: _Numbers = None
    attention_chunk_size: _Size = None
    sliding_window: Annotated[int, Field(ge=-1, le=1 << 40)] | None = None  # -1: of models whose class knows it
    sliding_window_pattern: int | str | None = None
    underscored_pattern: int | str | None = Field(default=None, alias="_sliding_window_pattern")
    use_sliding_window: bool | None = None
    num_nextn_predict_layers: _Layers = None
    mtp_num_hidden_layers: _Layers = None
    mamba_ssm_cache_dtype: str | None = None
    mamba_ssm_dtype: str | None = None


def texts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the configs of language models inside a config.json, innermost first, and at last the whole of it."""
    for key in TEXT_CONFIGS:
        if isinstance(config.get(key), Mapping):
            yield from texts(config[key])
    yield config


def read_config(text: bytes, where: str, todo: str) -> dict[str, Any] | None:
    """Return the object in a config.json; None: the text holds none. `where`, `todo`: of the error.

    Raises PreflightError for a key of another type than it has in every model.
    """
    try:
        config = from_json(text)
    except ValueError:  # also of what is nested too deeply, or is not UTF-8
        return None
    if not isinstance(config, dict):
        return None
    check_config(config, where, todo)
    return config


def check_config(config: Mapping[str, Any], where: str, todo: str) -> None:
    """Check a model's config.json as it was read. Raises PreflightError as `read_config` does."""
    _check(config, "", _DEEPEST, where, todo)


def _check(config: Mapping[str, Any], path: str, levels: int, where: str, todo: str) -> None:
    if not levels:
        raise _config_error(
            f"config.json has more than {_DEEPEST} configs inside each other ({path[:-1]})", where, todo
        )
    try:
        _Text.model_validate(config)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = f"{path}{first['loc'][0]}"
        raise _config_error(
            f"{key} of config.json is {_value_text(first['input'])}: {_expectation(first)}", where, todo
        ) from None
    for key in TEXT_CONFIGS:
        if isinstance(inner := config.get(key), Mapping):
            _check(inner, f"{path}{key}.", levels - 1, where, todo)


def _expectation(error: Mapping[str, Any]) -> str:
    message = str(error["msg"])
    return message[:1].lower() + message[1:]


def _value_text(value: object) -> str:
    text = repr(value) if isinstance(value, str | int | float | None) else f"of the type {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _config_error(what: str, where: str, todo: str) -> PreflightError:
    return PreflightError(what, where=where, cause="the file was edited or damaged, or is of no model", todo=todo)


QUANTIZATION_KEY = "quantization_config"
SEPARATE_QUANTIZATION = "hf_quant_config.json"
"""Where ModelOpt wrote it until 0.29. vLLM reads it where config.json has no quantization_config."""
_COMPRESSED_TENSORS = "compressed-tensors"
_OF_PRODUCER = {
    **dict.fromkeys(("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"), "modelopt"),
    "NVFP4": "modelopt_fp4",
}
"""The quant_method of ModelOpt's own layout, by its quant_algo."""
_MODELOPT_KV = ("fp8", "nvfp4")


def with_separate_quantization(config: Mapping[str, Any], separate: object) -> dict[str, Any]:
    """Return a config.json as vLLM completes it. `separate`: what hf_quant_config.json holds."""
    return (
        {**config, QUANTIZATION_KEY: separate}
        if config.get(QUANTIZATION_KEY) is None and isinstance(separate, Mapping)
        else dict(config)
    )


def is_quantized(config: Mapping[str, Any]) -> bool:
    """Return whether the checkpoint states a quantization of its own."""
    return bool(_quantization_config(config))


def kv_dtype_of(config: Mapping[str, Any], *, latent: bool) -> str | None:
    """Return the type of KV; None: that of the model. `latent`: MLA, whose class does not look at compressed-tensors'
    scheme.

    Raises UnknownModelError for a checkpoint that vLLM does not load.
    """
    method = _method(_quantization_config(config))
    if method == _COMPRESSED_TENSORS:
        return None if latent else _compressed_dtype(_quantization_config(config).get("kv_cache_scheme"))
    # vLLM looks for ModelOpt's at the top of config.json alone.
    top = _mapping(config.get(QUANTIZATION_KEY))
    return _modelopt(top) if _method(top).startswith("modelopt") else None


def _quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Find the quantization as vLLM's get_quant_config does (model_executor/model_loader/weight_utils.py): in this
    order; empty: none."""
    for holder, key in (
        (config, QUANTIZATION_KEY),
        (_mapping(config.get("text_config")), QUANTIZATION_KEY),
        (config, "compression_config"),
    ):
        if isinstance(found := holder.get(key), Mapping):
            return found
    return {}


def _method(stated: Mapping[str, Any]) -> str:
    inner = _mapping(stated.get("quantization"))
    by_modelopt = _mapping(stated.get("producer")).get("name") == "modelopt" or "modelopt_quant_config" in inner
    if by_modelopt and (algorithm := inner.get("quant_algo")) is not None:
        if (method := _OF_PRODUCER.get(str(algorithm).upper())) is None:
            raise UnknownModelError(f"vLLM does not know the quant_algo {str(algorithm)[:40]!r} of ModelOpt")
        return method
    return str(stated.get("quant_method", "")).lower().replace("compressed_tensors", _COMPRESSED_TENSORS)


def _modelopt(stated: Mapping[str, Any]) -> str | None:
    inner = stated.get("quantization", stated)
    inner = inner if isinstance(inner, Mapping) else {}
    wanted = (
        inner.get("kv_cache_scheme")
        or stated.get("kv_cache_scheme")
        or inner.get("kv_cache_quant_algo")
        or stated.get("kv_cache_quant_algo")
    )
    if isinstance(wanted, Mapping):
        return _of_scheme(wanted)
    return wanted.lower() if isinstance(wanted, str) and wanted.lower() in _MODELOPT_KV else None


def _of_scheme(scheme: Mapping[str, Any]) -> str | None:
    if scheme.get("type") != "float":
        return None
    if scheme.get("num_bits") == 8 and scheme.get("dynamic") is False:
        return "fp8"
    return "nvfp4" if scheme.get("num_bits") == 4 else None


def _compressed_dtype(scheme: object) -> str | None:
    if scheme is None:
        return None
    if not isinstance(scheme, Mapping) or scheme.get("type") != "float" or scheme.get("num_bits") != 8:
        raise UnknownModelError("vLLM takes no kv_cache_scheme of compressed-tensors but one of floats of 8 bits")
    return "fp8"


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
