"""The KV cache of a tiny model as pdserve computes it, in the form in which the probe records vLLM's."""

from __future__ import annotations

from typing import Any

from pdserve.models.kv_cache import KvCache, kv_cache
from pdserve.models.layers import layers_of
from pdserve.plan.model_rules import drafts_for_itself, kv_flags
from tests.models.tiny_configs import Tiny
from tests.plan.kit import recipe

_SPECS = {"full": "FullAttentionSpec", "window": "SlidingWindowSpec", "recurrent": "MambaSpec"}


def cache_of(tiny: Tiny) -> KvCache:
    """As `pdserve plan` has it for a recipe with the model's flags on a CPU."""
    made = recipe({"engine": {"args": tiny.args}, "prefill": {"parallel": {"tp": tiny.tp, "pp": tiny.pp}}})
    name, role = made.roles()[0]
    flags, _ = kv_flags(made, name, role, tiny.config)
    return kv_cache(layers_of(tiny.config, drafts=drafts_for_itself(tiny.args)), flags)


def numbers_of(tiny: Tiny) -> dict[str, Any]:
    cache = cache_of(tiny)
    blocks = cache.blocks(tiny.kv_bytes)
    return {
        "block_size": cache.flags.block_size,
        "num_blocks": blocks,
        "groups": sorted_groups(
            {
                "spec": "MLAAttentionSpec" if group.latent else _SPECS[group.keeps],
                "layers": len(group.layers),
                "block": group.block,
                "page_bytes": group.page_bytes,
            }
            for group in cache.groups
        ),
        "bytes_a_block": cache.block_bytes,
        "concurrency": cache.concurrency(blocks),
        "tokens": cache.tokens(blocks),
    }


def sorted_groups(groups: Any) -> list[dict[str, Any]]:
    """vLLM's order is that of its layers' names."""
    return sorted(groups, key=lambda group: sorted(map(str, group.values())))
