"""What a checkpoint says of its quantization, and the type of KV that it asks for with kv-cache-dtype auto.

The rules are vLLM 0.32's: _normalize_quantization_config (transformers_utils/model_arch_config_convertor.py),
get_kv_cache_quant_algo_string (utils/torch_utils.py), and for compressed-tensors the class Attention
(model_executor/layers/attention/attention.py) and CompressedTensorsKVCacheMethod.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdserve.models.unknown import UnknownModelError

KEY = "quantization_config"
SEPARATE = "hf_quant_config.json"
"""Where ModelOpt wrote it until 0.29. vLLM reads it where config.json has no quantization_config."""
_COMPRESSED = "compressed-tensors"
_OF_PRODUCER = {
    **dict.fromkeys(("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"), "modelopt"),
    "NVFP4": "modelopt_fp4",
}
"""The quant_method of ModelOpt's own layout, by its quant_algo."""
_MODELOPT_KV = ("fp8", "nvfp4")


def with_separate(config: Mapping[str, Any], separate: object) -> dict[str, Any]:
    """A config.json as vLLM completes it. `separate`: what hf_quant_config.json holds."""
    return {**config, KEY: separate} if config.get(KEY) is None and isinstance(separate, Mapping) else dict(config)


def is_quantized(config: Mapping[str, Any]) -> bool:
    """Whether the checkpoint states a quantization of its own."""
    return bool(_stated(config))


def kv_dtype_of(config: Mapping[str, Any], *, latent: bool) -> str | None:
    """None: that of the model. `latent`: MLA, whose class does not look at compressed-tensors' scheme.

    Raises UnknownModelError for a checkpoint that vLLM does not load.
    """
    method = _method(_stated(config))
    if method == _COMPRESSED:
        return None if latent else _compressed(_stated(config).get("kv_cache_scheme"))
    # vLLM looks for ModelOpt's at the top of config.json alone.
    top = _mapping(config.get(KEY))
    return _modelopt(top) if _method(top).startswith("modelopt") else None


def _stated(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """get_quant_config (model_executor/model_loader/weight_utils.py): in this order; empty: none."""
    for holder, key in ((config, KEY), (_mapping(config.get("text_config")), KEY), (config, "compression_config")):
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
    return str(stated.get("quant_method", "")).lower().replace("compressed_tensors", _COMPRESSED)


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


def _compressed(scheme: object) -> str | None:
    if scheme is None:
        return None
    if not isinstance(scheme, Mapping) or scheme.get("type") != "float" or scheme.get("num_bits") != 8:
        raise UnknownModelError("vLLM takes no kv_cache_scheme of compressed-tensors but one of floats of 8 bits")
    return "fp8"


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
