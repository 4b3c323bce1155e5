"""Hit rates by the size of L1: what is proposed, and what is said of it."""

from __future__ import annotations

import pytest

from pdserve.recipe.sections.lmcache import Eviction, Lmcache
from pdserve.sizing.given import Span
from pdserve.sizing.hit_rates import HitRate, HitRates, crossings_of, enough, held, notes_of, rounded_up
from tests.tables import each_row


def rate(gib: float, low: float, high: float | None = None) -> HitRate:
    return HitRate(l1_gib=gib, rate=Span(low=low, high=low if high is None else high))


def rates(now: HitRate, best: float, *sizes: HitRate) -> HitRates:
    return HitRates(
        server="lookups",
        source="cache simulator of lmcache 0.5.6",
        model="m",
        requests=10,
        tokens=10_000,
        chunks=40,
        best=best,
        sizes=sizes,
        now=now,
        enough_gib=enough(sizes, best),
        notes=(),
    )


def test_an_eviction_begins_at_the_watermark_and_takes_its_ratio_of_what_is_there() -> None:
    assert held(Eviction()) == pytest.approx((0.64, 0.8))
    assert held(Eviction(watermark=1.0, ratio=0.1)) == pytest.approx((0.9, 1.0))


def test_an_eviction_that_frees_all_leaves_something_to_count_with() -> None:
    low, high = held(Eviction(watermark=0.5, ratio=1.0))
    assert 0 < low < high


def test_the_smallest_size_counts_that_is_near_the_best_even_after_an_eviction() -> None:
    sizes = (rate(1, 0.2, 0.9), rate(2, 0.5, 0.9), rate(4, 0.899, 0.9), rate(8, 0.9))
    assert enough(sizes, 0.9) == 4


def test_nothing_is_proposed_where_nothing_comes_twice() -> None:
    assert enough((rate(1, 0.0), rate(2, 0.0)), 0.0) is None


@each_row(
    "gib, written", [(0.0731, 0.074), (371.2, 380.0), (1.0, 1.0), (0.33, 0.33), (9.99, 10.0), (0.1, 0.1), (64, 64)]
)
def test_a_size_is_rounded_up_to_two_digits(gib: float, written: float) -> None:
    assert rounded_up(gib) == written


def test_a_recipe_whose_l1_misses_what_a_larger_one_hits_is_told_both_numbers() -> None:
    [crossing] = crossings_of(rates(rate(1, 0.1, 0.2), 0.6, rate(1, 0.1, 0.2), rate(3.21, 0.6)))
    assert (crossing.severity, crossing.where) == ("warning", "lmcache.l1_size_gb")
    assert "with 1 GiB 20.0% of the tokens" in crossing.what
    assert "60.0%" in crossing.what
    assert "cache simulator of lmcache 0.5.6" in crossing.what
    assert crossing.todo.startswith("write lmcache.l1_size_gb: 3.3,")


@each_row("now, best", [
    (rate(4, 0.6), 0.6),
    # Less than one token in a hundred more.
    (rate(4, 0.0), 0.009), (rate(4, 0.0, 0.6), 0.6),
])  # fmt: skip
def test_nothing_is_said_where_a_larger_l1_gains_nothing(now: HitRate, best: float) -> None:
    assert list(crossings_of(rates(now, best, now, rate(8, best)))) == []


def test_what_the_simulator_does_not_count_is_noted() -> None:
    section = Lmcache(l1_size_gb=1, eviction=Eviction(policy="ARC"), l2=[{"type": "fs", "base_path": "/kv"}])
    texts = notes_of(section, ["a.jsonl:3: skipping malformed JSON", "a.jsonl:3: skipping malformed JSON"])
    assert any("evicts by ARC, the simulator by LRU" in text for text in texts)
    assert any("lmcache.l2 is not simulated" in text for text in texts)
    assert [text for text in texts if "malformed" in text] == [
        "the simulator warns: a.jsonl:3: skipping malformed JSON"
    ]
