"""What LMCache's connector remembers of a request, in tokens whatever the version counts in.

lmcache < 0.4.7 and the class that vLLM 0.21 has itself count in vLLM's blocks, later ones in tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

_CUT = "pdserve_cut"


class Cut(NamedTuple):
    """What was done about a request's hit the last time that vLLM asked."""

    found: int
    """Where the hit ends, and with it the read locks of its lookup."""
    skipped: bool
    left: int
    """Tokens of the hit that are computed instead."""


def awaits_admission(tracker: Any) -> bool:
    """The lookup's result has not been used: vLLM has not allocated blocks for the request yet."""
    return bool(tracker.state.name == "PREFETCHING")


def hit_tokens(tracker: Any, block_size: int) -> int:
    """Where LMCache's part of the request ends."""
    if hasattr(tracker, "num_lmcache_hit_tokens"):
        return int(tracker.num_lmcache_hit_tokens)
    return int(tracker.num_lmcache_hit_blocks) * block_size


def lower(tracker: Any, end: int, block_size: int) -> None:
    """Ends LMCache's part at `end`; what is computed from there on is stored like any new token.

    The stored part must end there too: lmcache <= 0.5.5 adds the whole hit to it at every poll, after which a request
    that had to wait for blocks never stores anything.
    """
    if hasattr(tracker, "num_lmcache_hit_tokens"):
        tracker.num_lmcache_hit_tokens = tracker.num_stored_tokens = end
    else:
        tracker.num_lmcache_hit_blocks = tracker.num_stored_blocks = end // block_size


def remember(tracker: Any, cut: Cut) -> None:
    """It lives and dies with the tracker: nothing to clean up."""
    setattr(tracker, _CUT, cut)


def last_cut(tracker: Any) -> Cut | None:
    """None: vLLM was never offered a load of this request."""
    return getattr(tracker, _CUT, None)


def token_ids(tracker: Any) -> list[int]:
    """Those that the lookup was made with: its locks have keys made of them."""
    if hasattr(tracker, "get_token_ids"):
        return list(tracker.get_token_ids())
    return list(tracker.all_token_ids)
