"""One request on its way: KV that prefill sends to decode, and which side ends first at given rates."""

from __future__ import annotations

import math

from pdserve.models.kv_cache import CacheGroup, KvCache
from pdserve.plan.frozen import Frozen
from pdserve.sizing.engines import RoleSize
from pdserve.sizing.given import Given

_BITS = 8


class RequestTransfer(Frozen):
    """The KV of one prompt."""

    prompt_tokens: int
    request_bytes: int
    copies: int
    """MLA: every TP rank of decode receives the whole."""
    seconds: float | None
    """Alone on the link at its full rate; None: no rate is given."""


class Balance(Frozen):
    """Requests a second that each side can do, all its instances together."""

    prefill: float
    decode: float

    @property
    def starved(self) -> str | None:
        """The side that has less to do than it could, by a quarter or more."""
        if max(self.prefill, self.decode) < _UNEVEN * min(self.prefill, self.decode):
            return None
        return "decode" if self.prefill < self.decode else "prefill"


_UNEVEN = 1.25


def transfer(decode: RoleSize, cache: KvCache, given: Given) -> RequestTransfer | None:
    """By what the ranks of one decode instance receive. None without a length of prompts."""
    if given.prompt_tokens is None:
        return None
    of_rank = sum(
        group.page_bytes * len(group.layers) * _sent_blocks(group, given.prompt_tokens) for group in cache.groups
    )
    total = of_rank * decode.tp
    return RequestTransfer(
        prompt_tokens=given.prompt_tokens,
        request_bytes=total,
        copies=decode.tp if cache.ranks_share else 1,
        seconds=None if given.link_gbit is None else total * _BITS / (given.link_gbit * 1e9),
    )


def _sent_blocks(group: CacheGroup, prompt_tokens: int) -> int:
    if group.keeps == "recurrent":
        return 1
    if group.keeps == "window":
        # NIXL and Mooncake send the window and a block more (nixl/base_scheduler.py, mooncake_connector.py:
        # blocks_per_sw), whatever else prefill holds while it computes.
        return min(math.ceil(prompt_tokens / group.block), math.ceil(group.reach / group.block) + 1)
    return min(math.ceil(prompt_tokens / group.block), group.blocks_a_request)


def balance(prefill: RoleSize, decode: RoleSize, given: Given) -> Balance | None:
    """None where a length or a rate is missing."""
    prompt, output, filled, written = given.prompt_tokens, given.output_tokens, given.prefill_rate, given.decode_rate
    if prompt is None or output is None or filled is None or written is None:
        return None
    return Balance(prefill=prefill.instances * filled / prompt, decode=decode.instances * written / output)
