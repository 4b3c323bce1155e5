"""A model's config.json as it is read here: parsed once, with every key that this package computes with of its type.

The types are those of transformers' configuration classes. Whatever is not of them is refused here, so that no function
behind this one asks again whether a size is a number. Keys that are not read may hold anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from pdserve.errors import PreflightError

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
    """The configs of language models inside a config.json, innermost first, and at last the whole of it."""
    for key in TEXT_CONFIGS:
        if isinstance(config.get(key), Mapping):
            yield from texts(config[key])
    yield config


def read(text: bytes, where: str, todo: str) -> dict[str, Any] | None:
    """The object in a config.json; None: the text holds none. `where`, `todo`: of the error.

    Raises PreflightError for a key of another type than it has in every model.
    """
    try:
        config = from_json(text)
    except ValueError:  # also of what is nested too deeply, or is not UTF-8
        return None
    if not isinstance(config, dict):
        return None
    check(config, where, todo)
    return config


def check(config: Mapping[str, Any], where: str, todo: str) -> None:
    """Raises PreflightError as `read` does."""
    _check(config, "", _DEEPEST, where, todo)


def _check(config: Mapping[str, Any], path: str, levels: int, where: str, todo: str) -> None:
    if not levels:
        raise _refused(f"config.json has more than {_DEEPEST} configs inside each other ({path[:-1]})", where, todo)
    try:
        _Text.model_validate(config)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = f"{path}{first['loc'][0]}"
        raise _refused(f"{key} of config.json is {_shown(first['input'])}: {_expected(first)}", where, todo) from None
    for key in TEXT_CONFIGS:
        if isinstance(inner := config.get(key), Mapping):
            _check(inner, f"{path}{key}.", levels - 1, where, todo)


def _expected(error: Mapping[str, Any]) -> str:
    message = str(error["msg"])
    return message[:1].lower() + message[1:]


def _shown(value: object) -> str:
    text = repr(value) if isinstance(value, str | int | float | None) else f"of the type {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _refused(what: str, where: str, todo: str) -> PreflightError:
    return PreflightError(what, where=where, cause="the file was edited or damaged, or is of no model", todo=todo)
