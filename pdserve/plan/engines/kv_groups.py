"""KV cache groups of a model, and whether chunks of a given size can ever be stored over all of them.

vLLM gives layers of one kind (full attention, a sliding window, recurrent state) block tables of their own, a group
each, and their blocks may span different numbers of tokens. LMCache stores a chunk over all groups at once, so a chunk
must consist of whole blocks of each. The rules are those of lmcache 0.5.6 (get_vllm_scheduler_block_size,
validate_mamba_step_alignment, validate_kv_cache_groups, GetStoreMetadata) and of vllm 0.32 (offloading/config.py);
tests/upstream/test_hybrid_groups.py compares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pdserve.models.kv_cache import KvCache

MambaMode = Literal["none", "align", "all"]


@dataclass(frozen=True)
class Group:
    """One block table. `block`: tokens of a block, as the group's own spec has it."""

    block: int
    kind: Literal["attention", "recurrent", "scratch"] = "attention"
    """recurrent: state snapshots (Mamba, GDN, linear attention). scratch: never cached, it covers no tokens."""
    mode: MambaMode = "align"
    """Of a recurrent group: when its state is kept."""

    def span(self, dcp: int = 1) -> int:
        """Tokens of the whole sequence behind one block id. Under decode context parallelism an attention block is
        one rank's share; recurrent state is on every rank."""
        if self.kind == "scratch":
            return 0
        return self.block * dcp if self.kind == "attention" else self.block


def table_groups(cache: KvCache) -> tuple[Group, ...]:
    """The groups of a cache as LMCache sees them."""
    mode: MambaMode = "align" if cache.flags.prefix_caching else "none"
    return tuple(
        Group(group.block, "recurrent", mode) if group.keeps == "recurrent" else Group(group.block)
        for group in cache.groups
    )


def scheduler_block(groups: Sequence[Group], dcp: int = 1) -> int:
    """The step that all groups have in common: the least common multiple of their spans. ValueError without groups
    that cover tokens."""
    spans = [span for group in groups if (span := group.span(dcp)) > 0]
    if not spans:
        raise ValueError("no group covers tokens")
    return math.lcm(*spans)


def lmcache_refusal(
    groups: Sequence[Group], chunk: int, *, dcp: int = 1, max_batched_tokens: int | None = None
) -> str | None:
    """Why LMCache's connector or its registration refuses these groups with chunks of so many tokens; None: it takes
    them. `max_batched_tokens`: of vLLM's scheduler; None: not known."""
    unkept = [index for index, group in enumerate(groups) if group.kind == "recurrent" and group.mode == "none"]
    if unkept:
        return f"group {unkept[0]} keeps no recurrent state that could be stored (mamba-cache-mode none)"
    aligned = {group.block for group in groups if group.kind == "recurrent" and group.mode == "align"}
    if len(aligned) > 1:
        return f"recurrent groups with blocks of different sizes: {_listed(sorted(aligned))}"
    if aligned and max_batched_tokens is not None and max_batched_tokens < max(aligned):
        return (
            f"a step of {max_batched_tokens} tokens (max-num-batched-tokens) never fills a block of recurrent state, "
            f"which has {max(aligned)}"
        )
    block = scheduler_block(groups, dcp)
    if chunk % block:
        spans = sorted({span for group in groups if (span := group.span(dcp))}, reverse=True)
        return f"a chunk of {chunk} tokens does not consist of whole blocks of {_listed(spans)} tokens"
    return None


def can_store(chunk: int, longest_prompt: int) -> bool:
    """Whether any prompt fills a chunk: only whole chunks of a prompt are stored. `longest_prompt`: one less than
    max-model-len, because vLLM wants room for a token of output."""
    return chunk <= longest_prompt


def good_chunk(groups: Sequence[Group], wanted: int, dcp: int = 1) -> int:
    """The chunk size closest below `wanted` that consists of whole blocks of every group, or the smallest there is."""
    block = scheduler_block(groups, dcp)
    return max(wanted // block, 1) * block


def offloading_refusal(groups: Sequence[Group], block_size: int | None, *, dcp: int = 1) -> str | None:
    """Why vLLM's own OffloadingConnector refuses these groups with `block_size` in its extra config (None: not set,
    it then offloads block by block, each group by its own)."""
    spans = sorted({span for group in groups if (span := group.span(dcp))}, reverse=True)
    if not spans:
        return "no group covers tokens"
    if block_size is None:
        return None
    if len(spans) > 1:
        return f"block_size needs groups with blocks of one size, and these have {_listed(spans)}: use blocks_per_chunk"
    if block_size % spans[0]:
        return f"block_size {block_size} is not a multiple of the KV block, {spans[0]} tokens"
    return None


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
