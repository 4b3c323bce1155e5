"""Which requests a load has: the same for the same seed, of mixed length, with shared prefixes."""

from __future__ import annotations

from collections import Counter

import pytest

from pdserve.verify.load.schedule import GROUPS, LoadRequest, Schedule

CHUNK, WINDOW, LONGEST = 256, 50, 1500


def schedule(seed: int = 0, sample: float = 0.25) -> Schedule:
    return Schedule(
        pool=tuple(range(100, 1100)),
        chunk=CHUNK,
        longest=LONGEST,
        model_limit=2000,
        window=WINDOW,
        sample=sample,
        seed=seed,
    )


@pytest.fixture(scope="module")
def planned() -> list[LoadRequest]:
    return [schedule().planned(number) for number in range(400)]


def test_the_same_seed_plans_the_same_requests_in_any_order(planned: list[LoadRequest]) -> None:
    assert [schedule().planned(number) for number in reversed(range(400))] == planned[::-1]


def test_each_prompt_has_the_prefix_of_its_group_and_a_tail(planned: list[LoadRequest]) -> None:
    prefixes = [schedule().prefix(group) for group in range(GROUPS)]
    assert sorted({len(prefix) for prefix in prefixes}) == [CHUNK, 2 * CHUNK]
    assert len({prefix[:CHUNK] for prefix in prefixes}) == GROUPS
    for request in planned:
        prefix = prefixes[request.group]
        assert request.prompt[: len(prefix)] == prefix
        assert len(prefix) < len(request.prompt) <= LONGEST


def test_each_window_begins_with_an_answered_prompt_of_each_group(planned: list[LoadRequest]) -> None:
    """They reload the prefixes, which the proof counts, and the first of them is always compared."""
    for first in range(0, 400, WINDOW):
        begin = planned[first : first + GROUPS]
        assert [request.group for request in begin] == list(range(GROUPS))
        assert {request.ending for request in begin} == {"whole"}
        assert planned[first].compared


def test_some_prompts_come_again_within_a_window_and_some_requests_are_left(planned: list[LoadRequest]) -> None:
    prompts = Counter(request.prompt for request in planned)
    assert sum(count - 1 for count in prompts.values()) > 20
    endings = Counter(request.ending for request in planned)
    assert endings["left-after-first-chunk"] > 5
    assert endings["left-before-first-byte"] > 5
    assert endings["whole"] > 300


def test_the_sample_is_a_share_of_what_is_answered() -> None:
    def compared(sample: float) -> int:
        return sum(schedule(sample=sample).planned(number).compared for number in range(400))

    whole = sum(schedule().planned(number).ending == "whole" for number in range(400))
    assert compared(0) == 400 // WINDOW
    assert 60 < compared(0.25) < 140
    assert compared(1) == whole
