"""Bound what a request reloads of LMCache's hit. Pure: imports no engine, so that it is tested without one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pdserve.errors import StartError

CAP_KEY = "pdserve.max_tokens_per_load"
LEAST_KEY = "pdserve.min_load_tokens"
CAP_SWITCH = "CHUNKED_LMCACHE_MAX_TOKENS_PER_LOAD"
"""Overrides the cap of the configuration; 0 turns it off."""


class ReloadedPart(NamedTuple):
    """The part of a prompt that a request reloads."""

    end: int
    """In tokens of the prompt: the reload ends here, at a boundary of LMCache's chunks unless nothing was cut."""
    tokens: int
    """How many tokens vLLM gets from the reload; 0: none, all is computed."""


@dataclass(frozen=True)
class Bounds:
    """Most and least tokens of one reload; 0: no such bound."""

    cap: int = 0
    least: int = 0

    def take(self, *, computed: int, hit: int, offered: int, chunk: int) -> ReloadedPart:
        """Bound a reload of `offered` > 0 tokens.

        `computed`: tokens that vLLM has itself. `hit`: where the hit ends, a multiple of `chunk`. `offered` is hit -
        computed, or one less where vLLM must compute the last token of the prompt. A load ends at a boundary of chunks:
        LMCache reads whole ones. A load of less than a whole new chunk, or of less than `least` tokens, is not done: it
        ends where both tiers have everything.
        """
        end, tokens = hit, offered
        if self.cap and offered > self.cap:
            end = (computed + self.cap) // chunk * chunk
            tokens = end - computed
        if tokens <= 0 or tokens < self.least:
            return ReloadedPart(min(hit, computed // chunk * chunk), 0)
        return ReloadedPart(end, tokens)


def read_bounds(extra: Mapping[str, Any], environment: Mapping[str, str]) -> Bounds:
    """Return the bounds that a connector's extra config and the process's environment set. Raises StartError."""
    switch = environment.get(CAP_SWITCH, "").strip()
    cap = _tokens(CAP_SWITCH, switch) if switch else _tokens(CAP_KEY, extra.get(CAP_KEY))
    least = _tokens(LEAST_KEY, extra.get(LEAST_KEY))
    if cap and least > cap:
        raise StartError(f"no reload of at most {cap} tokens has {least} of them: raise {CAP_KEY} or lower {LEAST_KEY}")
    return Bounds(cap, least)


def check_chunk(set_to: Bounds, chunk: int) -> None:
    """Refuse a cap below one chunk: nothing would ever be loaded. Raises StartError."""
    if 0 < set_to.cap < chunk:
        raise StartError(
            f"LMCache loads whole chunks of {chunk} tokens, so a cap of {set_to.cap} loads nothing: raise {CAP_KEY}"
        )


def _tokens(name: str, value: Any) -> int:
    if value is None:
        return 0
    text = str(value).strip()
    if not (text.isascii() and text.isdecimal()):
        raise StartError(f"{name} is {value!r}, not a number of tokens; 0 turns it off")
    return int(text)


_WHOLE_PREFIX = {"FullAttentionSpec", "MLAAttentionSpec", "SinkFullAttentionSpec", "TQFullAttentionSpec"}
"""By exact name: RSWASpec, for one, is a FullAttentionSpec that keeps less."""


def check_prefixes_load(kv_cache_config: Any) -> None:
    """Check that every layer keeps the whole prefix. Raises StartError when one keeps less.

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


_CUT = "pdserve_cut"


class CutHit(NamedTuple):
    """A request's hit, as it was cut the last time that vLLM asked."""

    hit: int
    """Where the hit ends, and with it the read locks of its lookup."""
    skipped: bool
    left: int
    """Tokens of the hit that are computed instead."""


def awaits_admission(tracker: Any) -> bool:
    """Return whether the lookup's result is unused: vLLM has allocated no blocks for the request yet."""
    return bool(tracker.state.name == "PREFETCHING")


def lower_load_end(tracker: Any, end: int) -> None:
    """Ends LMCache's part of the request at `end`. What vLLM computes from there on is stored like any new token."""
    tracker.num_lmcache_hit_tokens = tracker.num_stored_tokens = end


def remember(tracker: Any, cut: CutHit) -> None:
    """Keep a cut hit on its tracker. It lives and dies with the tracker: nothing has to be cleaned up."""
    setattr(tracker, _CUT, cut)


def last_cut(tracker: Any) -> CutHit | None:
    """Return the last cut; None: vLLM was never offered a load of this request."""
    return getattr(tracker, _CUT, None)
