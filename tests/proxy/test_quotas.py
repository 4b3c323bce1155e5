"""Limits of a key: what is counted, for how long, and when to come back."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
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


def refused(counts: Quotas, who: ApiKey) -> ApiError:
    with pytest.raises(ApiError) as caught:
        counts.enter(who)
    assert caught.value.status == 429
    return caught.value


def test_a_key_without_limits_is_not_counted() -> None:
    counts = quotas(Clock())
    for _ in range(100):
        counts.enter(key()).end()
    assert counts.in_flight("a") == 0


def test_requests_at_once() -> None:
    counts = quotas(Clock())
    first = counts.enter(key(max_requests=2))
    counts.enter(key(max_requests=2))
    error = refused(counts, key(max_requests=2))
    assert error.message == "The limit of this API key is 2 requests at once."
    assert error.headers() == {"retry-after": "1"}
    assert counts.in_flight("a") == 2
    counts.enter(key("b", max_requests=2))
    first.end()
    first.end()
    assert counts.in_flight("a") == 1
    counts.enter(key(max_requests=2))
    assert counts.rejected == {("a", "max_requests"): 1}


def test_requests_a_minute_and_exactly_when_the_next_one_may_come() -> None:
    clock = Clock(1000.25)
    counts, who = quotas(clock), key(requests_per_minute=2)
    counts.enter(who).end()
    clock.now = 1010.75
    counts.enter(who).end()
    clock.now = 1030.5
    wait = refused(counts, who).retry_after
    assert wait == 31
    clock.now = 1030.5 + wait - 1
    refused(counts, who)
    clock.now = 1030.5 + wait
    counts.enter(who)
    assert refused(counts, who).retry_after == 10


def test_counts_outlive_a_reload_that_changes_the_limits() -> None:
    counts = quotas(Clock())
    for _ in range(3):
        counts.enter(key(max_requests=10))
    refused(counts, key(max_requests=3))
    refused(counts, key(requests_per_minute=3))


def test_processes_share_the_counts(tmp_path: Path) -> None:
    path, clock = tmp_path / "numbers", Clock()
    path.touch()

    def process(index: int) -> Quotas:
        return Quotas(shared_numbers.shared(path, cells_needed(2), process=index, processes=2), clock)

    first, second = process(0), process(1)
    who = key(max_requests=2, requests_per_minute=3)
    # Seen in another order by the other process: rows go by name.
    second.enter(key("other", max_requests=1))
    use = first.enter(who)
    second.enter(who)
    refused(first, who)
    refused(second, who)
    use.end()
    second.enter(who)
    assert refused(first, who).message == "The limit of this API key is 2 requests at once."
    assert (first.in_flight("a"), second.in_flight("a")) == (2, 2)
    successor = process(1)
    assert refused(successor, who).message == "The limit of this API key is 3 requests a minute."
    assert successor.in_flight("a") == 0


@given(st.lists(st.tuples(st.integers(0, 70) | st.sampled_from([59, 60, 61, 62]), st.integers(0, 20)), max_size=40))
def test_a_rate_is_a_naive_count(steps: list[tuple[int, int]]) -> None:
    """Counted, and when there is room again."""
    rate, second = _Rate(OwnCells(_RATE_CELLS), 0), 1000
    counted: list[int] = []

    def total(now: int) -> int:
        return sum(now - at <= WINDOW_SECONDS for at in counted)

    for pause, wanted in steps:
        second += pause
        assert rate.total(second) == total(second)
        rate.add_one(second)
        counted.append(second)
        assert rate.total(second) == total(second)
        assert rate.free_in(wanted, second) == next(wait for wait in range(1, 62) if total(second + wait) <= wanted)


STEP = st.tuples(
    st.sampled_from(["enter", "enter", "end", "wait", "obey"]), st.floats(0, 40, width=32), st.integers(1, 60)
)


@settings(max_examples=settings().max_examples * 3, deadline=None)
@given(steps=st.lists(STEP, max_size=80), start=st.floats(0, 5000, width=32))
def test_no_minute_has_more_than_the_limits(steps: list[tuple[str, float, int]], start: float) -> None:
    clock = Clock(start)
    counts, who = quotas(clock), key(max_requests=3, requests_per_minute=5)
    running: list[Use] = []
    entered: list[float] = []
    promised: float | None = None
    for what, pause, which in steps:
        if what == "wait":
            clock.now += pause
        elif what == "end" and running:
            running.pop(which % len(running)).end()
        elif what == "obey" and promised is not None:
            clock.now = max(clock.now, promised)
            while running:
                running.pop().end()
            counts.enter(who).end()
            entered.append(clock.now)
            promised = None
        elif what == "enter":
            try:
                running.append(counts.enter(who))
            except ApiError as error:
                if len(running) < 3:
                    promised = clock.now + error.retry_after
            else:
                entered.append(clock.now)
                promised = None
        assert counts.in_flight("a") == len(running) <= 3
    for began in entered:
        assert sum(began <= at < began + WINDOW_SECONDS for at in entered) <= 5
