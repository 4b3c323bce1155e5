"""Whether a prefix of LMCache's hit can be loaded by itself: it depends on the model's KV cache groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pdserve.errors import StartError

_WHOLE_PREFIX = {"FullAttentionSpec", "MLAAttentionSpec", "SinkFullAttentionSpec", "TQFullAttentionSpec"}
"""By exact name: RSWASpec, for one, is a FullAttentionSpec that keeps less."""


def check_prefixes_load(kv_cache_config: Any) -> None:
    """Raises StartError when a layer keeps less than the whole prefix.

    For a sliding window LMCache finds, and locks, the chunks at the end of the hit only; a Mamba state exists at some
    chunks' ends and not at others'. A reload that ends earlier would read what is not there.
    """
    others = sorted({type(spec).__name__ for spec in _specs(kv_cache_config)} - _WHOLE_PREFIX)
    if others:
        raise StartError(
            f"max_tokens_per_load needs full attention in every layer; this model has {', '.join(others)}: "
            "remove the cap (min_load_tokens works with every model)"
        )


def _specs(kv_cache_config: Any) -> Iterator[Any]:
    for group in getattr(kv_cache_config, "kv_cache_groups", None) or ():
        spec = group.kv_cache_spec
        by_layer = getattr(spec, "kv_cache_specs", None)
        yield from by_layer.values() if isinstance(by_layer, dict) else (spec,)
