"""The numbers of batches: each is applied exactly once and in order, or what is known is forgotten."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.pd.routing.kv_feed import Feed, Step
from pdserve.pd.routing.kv_sources import Source, sources_from, sources_of
from tests.proxy.rows import each


def test_in_order() -> None:
    feed = Feed()
    assert [feed.live(number) for number in range(3)] == [Step.APPLY] * 3
    assert feed.expected == 3


def test_a_gap_that_a_replay_fills() -> None:
    feed = Feed()
    feed.live(0)
    assert feed.live(3) is Step.GAP
    assert [feed.replayed(number) for number in (1, 2, 3, 4)] == [Step.APPLY] * 4
    assert [feed.live(number) for number in (3, 4, 5)] == [Step.SKIP, Step.SKIP, Step.APPLY]


def test_a_gap_that_is_never_filled() -> None:
    feed = Feed()
    feed.live(0)
    assert feed.live(3) is Step.GAP
    assert feed.live(3) is Step.GAP, "asking changes nothing"
    feed.jump(3, live=True)
    assert feed.live(4) is Step.APPLY


def test_a_replay_that_begins_too_late() -> None:
    feed = Feed()
    assert feed.live(9) is Step.GAP
    assert feed.replayed(5) is Step.GAP
    feed.jump(5, live=False)
    assert [feed.replayed(number) for number in (4, 6, 7, 8, 9)] == [Step.SKIP] + [Step.APPLY] * 4
    assert feed.live(9) is Step.SKIP


@each("first", [0, 1])
def test_an_engine_that_began_anew(first: int) -> None:
    feed = Feed()
    for number in range(3):
        feed.live(number)
    assert feed.live(first) is Step.RESTART
    assert feed.live(first) is (Step.APPLY if first == 0 else Step.GAP)


@given(lost=st.sets(st.integers(0, 30)), kept=st.integers(0, 31))
def test_nothing_is_applied_twice_or_after_something_that_is_missing(lost: set[int], kept: int) -> None:
    """A publisher of 31 batches whose replay has the last `kept` of those so far."""
    feed = Feed()
    known: list[int] = []
    for number in range(31):
        if number in lost:
            continue
        step = feed.live(number)
        if step is Step.GAP:
            for old in range(max(feed.expected, number + 1 - kept), number + 1):
                again = feed.replayed(old)
                if again is Step.GAP:
                    known.clear()
                    feed.jump(old, live=False)
                if again is not Step.SKIP:
                    known.append(old)
            step = feed.live(number)
        if step is Step.GAP:
            known.clear()
            feed.jump(number, live=True)
        if step in (Step.GAP, Step.APPLY):
            known.append(number)
        assert known == list(range(known[0], number + 1))


def test_sources_as_an_engine_reports_them() -> None:
    """The answer of GET /kv_event_sources."""
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "buffer_steps": 10_000, "topic": "kv"}
    answer = {
        "0": {**config, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://0.0.0.0:6557"},
        "1": {**config, "endpoint": "tcp://10.1.2.3:41234", "replay_endpoint": None},
        "2": {**config, "endpoint": "ipc:///tmp/events", "replay_endpoint": None},
    }
    assert sources_from(answer, "node-7") == (
        Source(0, "tcp://node-7:5557", "tcp://node-7:6557", "kv"),
        Source(1, "tcp://10.1.2.3:41234", None, "kv"),
        Source(2, "ipc:///tmp/events", None, "kv"),
    )
    assert sources_from({}, "node-7") == ()
    assert sources_from({"0": {"publisher": "null", "endpoint": "tcp://*:5557"}}, "node-7") == ()


def test_sources_as_the_engine_was_configured() -> None:
    assert sources_of("tcp://*:5557", "tcp://*:6557", "", "::1", ranks=2) == (
        Source(0, "tcp://[::1]:5557", "tcp://[::1]:6557"),
        Source(1, "tcp://[::1]:5558", "tcp://[::1]:6558"),
    )


@each(
    "answer",
    [
        [],
        {"0": "tcp://*:5557"},
        {"0": {"endpoint": None}},
        {"0": {"endpoint": "tcp://*:0"}},
        {"0": {"endpoint": "tcp://*"}},
        {"0": {"endpoint": "udp://*:5557"}},
        {"0": {"endpoint": "tcp://*:99999"}},
        {"zero": {"endpoint": "tcp://*:5557"}},
    ],
)
def test_an_answer_that_makes_no_sense(answer: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        sources_from(answer, "node-7")
