"""What LMCache's connector remembers of a request: its tracker, in tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

_CUT = "pdserve_cut"


class Cut(NamedTuple):
    """What was done about a request's hit the last time that vLLM asked."""

    hit: int
    """Where the hit ends, and with it the read locks of its lookup."""
    skipped: bool
    left: int
    """Tokens of the hit that are computed instead."""


def awaits_admission(tracker: Any) -> bool:
    """Whether the lookup's result is unused: vLLM has allocated no blocks for the request yet."""
    return bool(tracker.state.name == "PREFETCHING")


def lower(tracker: Any, end: int) -> None:
    """Ends LMCache's part of the request at `end`. What vLLM computes from there on is stored like any new token."""
    tracker.num_lmcache_hit_tokens = tracker.num_stored_tokens = end


def remember(tracker: Any, cut: Cut) -> None:
    """It lives and dies with the tracker: nothing to clean up."""
    setattr(tracker, _CUT, cut)


def last_cut(tracker: Any) -> Cut | None:
    """None: vLLM was never offered a load of this request."""
    return getattr(tracker, _CUT, None)
