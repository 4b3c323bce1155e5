"""Conditional disaggregation: which prompts decode computes itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.pd.config.routing import ConditionalSettings
from pdserve.pd.routing.conditional import WAY_WHYS, decide
from tests.proxy.rows import each


def limits(min_prompt: int, max_missing: int) -> ConditionalSettings:
    """0: there is none."""
    return ConditionalSettings(min_prompt_tokens=min_prompt or None, max_missing_tokens=max_missing or None)


@each(
    "estimate, held, min_prompt, max_missing, way, why",
    [
        (10, 0, 0, 0, "disaggregate", "off"),
        (10, 10, 0, 0, "disaggregate", "off"),
        (99, 0, 100, 0, "decode-only", "short"),
        (100, 0, 100, 0, "disaggregate", "long"),
        (5000, 4500, 0, 500, "decode-only", "held"),
        (5000, 4499, 0, 500, "disaggregate", "long"),
        (400, 0, 0, 500, "disaggregate", "long"),  # nothing of it is held
        (400, 16, 0, 500, "decode-only", "held"),
        (50, 48, 100, 500, "decode-only", "short"),
        (5000, 5000, 100, 500, "decode-only", "held"),
    ],
)
def test_table(estimate: int, held: int, min_prompt: int, max_missing: int, way: str, why: str) -> None:
    decision = decide(estimate, held, limits(min_prompt, max_missing))
    assert (decision.way, decision.why) == (way, why)


tokens = st.integers(0, 10_000)


@given(estimate=tokens, held=tokens, more=st.integers(1, 500), min_prompt=tokens, max_missing=tokens)
def test_holding_more_never_sends_a_prompt_to_prefill(
    estimate: int, held: int, more: int, min_prompt: int, max_missing: int
) -> None:
    thresholds = limits(min_prompt, max_missing)
    first, second = decide(estimate, held, thresholds), decide(estimate, held + more, thresholds)
    assert first.why in WAY_WHYS
    assert not (first.way == "decode-only" and second.way == "disaggregate")
