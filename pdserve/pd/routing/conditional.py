"""Conditional disaggregation: whether decode computes the prompt itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from pdserve.pd.config.routing import ConditionalSettings

Way = Literal["disaggregate", "decode-only"]
WayWhy = Literal[
    "off",  # no condition is set
    "short",  # fewer tokens than min_prompt_tokens
    "held",  # decode lacks at most max_missing_tokens
    "long",  # neither
]
WAY_WHYS: tuple[WayWhy, ...] = get_args(WayWhy)


@dataclass(frozen=True, slots=True)
class SkipDecision:
    """`why` is a label of the decision counter."""

    way: Way
    why: WayWhy


_OFF = SkipDecision("disaggregate", "off")
_SHORT = SkipDecision("decode-only", "short")
_HELD = SkipDecision("decode-only", "held")
_LONG = SkipDecision("disaggregate", "long")


def decide(estimate: int, held_by_decode: int, thresholds: ConditionalSettings) -> SkipDecision:
    """Both in tokens, `held_by_decode` of this prompt at the decode worker that was chosen.

    A prompt of which decode holds nothing is never "held", however short: that is what min_prompt_tokens is for.
    """
    least, most_missing = thresholds.min_prompt_tokens, thresholds.max_missing_tokens
    if least is not None and estimate < least:
        return _SHORT
    if most_missing is not None and held_by_decode and estimate - held_by_decode <= most_missing:
        return _HELD
    return _OFF if least is None and most_missing is None else _LONG
