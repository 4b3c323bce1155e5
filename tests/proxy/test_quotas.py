"""Limits of a key: what is counted, for how long, and when to come back."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdserve.pd.errors import ApiError
from pdserve.pd.limits.api_keys import ApiKey
from pdserve.pd.limits.cells import OwnCells
from pdserve.pd.limits.quotas import _RATE_CELLS, WINDOW_SECONDS, Quotas, Use, _Rate, cells_needed
from pdserve.pd.processes import shared_numbers


class Clock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def quotas(clock: Clock) -> Quotas:
    return Quotas(shared_numbers.private(cells_needed(1)), clock)


def key(name: str = "a", **limits: int) -> ApiKey:
    return ApiKey(name, bytes(32), **limits)


def refused(counts: Quotas, who: ApiKey, estimate: int = 1) -> ApiError:
    with pytest.raises(ApiError) as caught:
        counts.enter(who, estimate)
    assert caught.value.status == 429
    return caught.value


def test_a_key_without_limits_is_not_counted() -> None:
    counts = quotas(Clock())
    for _ in range(100):
        counts.enter(key(), 1_000_000).end(5)
    assert counts.in_flight("a") == 0


def test_requests_at_once() -> None:
    counts = quotas(Clock())
    first = counts.enter(key(max_requests=2), 1)
    counts.enter(key(max_requests=2), 1)
    error = refused(counts, key(max_requests=2))
    assert error.message == "The limit of this API key is 2 requests at once."
    assert error.headers() == {"retry-after": "1"}
    assert counts.in_flight("a") == 2
    counts.enter(key("b", max_requests=2), 1)
    first.end(None)
    first.end(None)
    assert counts.in_flight("a") == 1
    counts.enter(key(max_requests=2), 1)
    assert counts.rejected == {("a", "max_requests"): 1}


def test_requests_a_minute_and_exactly_when_the_next_one_may_come() -> None:
    clock = Clock(1000.25)
    counts, who = quotas(clock), key(requests_per_minute=2)
    counts.enter(who, 1).end(1)
    clock.now = 1010.75
    counts.enter(who, 1).end(1)
    clock.now = 1030.5
    wait = refused(counts, who).retry_after
    assert wait == 31
    clock.now = 1030.5 + wait - 1
    refused(counts, who)
    clock.now = 1030.5 + wait
    counts.enter(who, 1)
    assert refused(counts, who).retry_after == 10


def test_tokens_are_counted_by_estimate_and_then_as_they_were() -> None:
    clock = Clock()
    counts, who = quotas(clock), key(tokens_per_minute=100)
    cheap = counts.enter(who, 80)
    refused(counts, who, 21)
    cheap.end(30)
    dear = counts.enter(who, 70)
    dear.end(500)
    error = refused(counts, who, 1)
    assert error.message == "The limit of this API key is 100 tokens a minute."
    assert error.retry_after == 61
    clock.now += 61
    counts.enter(who, 100)


def test_an_end_without_a_figure_leaves_the_estimate() -> None:
    counts, who = quotas(Clock()), key(tokens_per_minute=100)
    counts.enter(who, 80).end(None)
    refused(counts, who, 21)
    counts.enter(who, 20)


def test_what_is_given_back_late_is_not_given_back_twice() -> None:
    clock = Clock()
    counts, who = quotas(clock), key(tokens_per_minute=100)
    long = counts.enter(who, 100)
    clock.now += 100
    counts.enter(who, 60)
    long.end(10)
    refused(counts, who, 41)
    counts.enter(who, 40)


def test_tokens_beyond_the_estimate_count_when_they_were_used() -> None:
    clock = Clock()
    counts, who = quotas(clock), key(tokens_per_minute=100)
    use = counts.enter(who, 10)
    clock.now += 59
    use.end(100)
    clock.now += 5
    assert refused(counts, who, 11).retry_after == 56


def test_a_request_larger_than_the_limit_enters_alone() -> None:
    clock = Clock()
    counts, who = quotas(clock), key(tokens_per_minute=100)
    counts.enter(who, 5000)
    wait = refused(counts, who, 5000).retry_after
    clock.now += wait
    counts.enter(who, 5000)


def test_a_refusal_counts_nothing() -> None:
    counts, who = quotas(Clock()), key(tokens_per_minute=100, requests_per_minute=3, max_requests=3)
    counts.enter(who, 90)
    for _ in range(10):
        refused(counts, who, 50)
    counts.enter(who, 10)
    assert counts.in_flight("a") == 2


def test_counts_outlive_a_reload_that_changes_the_limits() -> None:
    counts = quotas(Clock())
    for _ in range(3):
        counts.enter(key(max_requests=10), 50)
    refused(counts, key(max_requests=3))
    refused(counts, key(requests_per_minute=3))
    refused(counts, key(tokens_per_minute=150))


def test_processes_share_the_counts(tmp_path: Path) -> None:
    path, clock = tmp_path / "numbers", Clock()
    path.touch()

    def process(index: int) -> Quotas:
        return Quotas(shared_numbers.shared(path, cells_needed(2), process=index, processes=2), clock)

    first, second = process(0), process(1)
    who = key(max_requests=2, requests_per_minute=3)
    # Seen in another order by the other process: rows go by name.
    second.enter(key("other", max_requests=1), 1)
    use = first.enter(who, 1)
    second.enter(who, 1)
    refused(first, who)
    refused(second, who)
    use.end(None)
    second.enter(who, 1)
    assert refused(first, who).message == "The limit of this API key is 2 requests at once."
    assert (first.in_flight("a"), second.in_flight("a")) == (2, 2)
    successor = process(1)
    assert refused(successor, who).message == "The limit of this API key is 3 requests a minute."
    assert successor.in_flight("a") == 0


AGES = st.integers(0, 70) | st.sampled_from([59, 60, 61, 62])


@given(st.lists(st.tuples(AGES, st.integers(1, 9), AGES, st.integers(0, 20)), max_size=20))
def test_a_rate_is_a_naive_count(steps: list[tuple[int, int, int, int]]) -> None:
    """Counted, given back however late (or more than there was), and when there is room again."""
    rate, second = _Rate(OwnCells(_RATE_CELLS), 0), 1000
    counted: dict[int, int] = {}

    def total(now: int) -> int:
        return sum(amount for at, amount in counted.items() if now - at <= WINDOW_SECONDS)

    for pause, amount, age, wanted in steps:
        second += pause
        assert rate.total(second) == total(second)
        rate.add(amount, second)
        counted[second] = counted.get(second, 0) + amount
        rate.add(-wanted, second - age)
        if (at := second - age) in counted and age <= WINDOW_SECONDS:
            counted[at] -= min(wanted, counted[at])
        assert rate.total(second) == total(second)
        assert rate.free_in(wanted, second) == next(wait for wait in range(1, 62) if total(second + wait) <= wanted)


STEP = st.tuples(
    st.sampled_from(["enter", "enter", "end", "wait", "obey"]), st.floats(0, 40, width=32), st.integers(1, 60)
)


BOTH_LIMITS = [
    *(("enter", 0.0, 1), ("enter", 0.0, 1), ("enter", 0.0, 1), ("end", 0.0, 1), ("wait", 1.0, 1)),
    *(("enter", 0.0, 1), ("end", 0.0, 1), ("enter", 0.0, 49), ("end", 0.0, 1), ("enter", 0.0, 51), ("obey", 0.0, 1)),
]
"""The last one is a request too many, and has too many tokens for a second longer."""


@example(steps=BOTH_LIMITS, start=0.0)
@settings(max_examples=settings().max_examples * 3, deadline=None)
@given(steps=st.lists(STEP, max_size=80), start=st.floats(0, 5000, width=32))
def test_no_minute_has_more_than_the_limits(steps: list[tuple[str, float, int]], start: float) -> None:
    clock = Clock(start)
    counts, who = quotas(clock), key(max_requests=3, requests_per_minute=5, tokens_per_minute=100)
    running: list[tuple[Use, int]] = []
    entered: list[tuple[float, int]] = []
    promised: tuple[float, int] | None = None
    for what, pause, amount in steps:
        if what == "wait":
            clock.now += pause
        elif what == "end" and running:
            use, estimate = running.pop(amount % len(running))
            use.end(estimate)
        elif what == "obey" and promised is not None:
            until, estimate = promised
            clock.now = max(clock.now, until)
            while running:
                use, counted = running.pop()
                use.end(counted)
            counts.enter(who, estimate).end(estimate)
            entered.append((clock.now, estimate))
            promised = None
        elif what == "enter":
            try:
                running.append((counts.enter(who, amount), amount))
            except ApiError as error:
                if len(running) < 3:
                    promised = (clock.now + error.retry_after, amount)
            else:
                entered.append((clock.now, amount))
                promised = None
        assert counts.in_flight("a") == len(running) <= 3
    for began, _ in entered:
        minute = [tokens for at, tokens in entered if began <= at < began + WINDOW_SECONDS]
        assert len(minute) <= 5
        assert sum(minute) <= 100
