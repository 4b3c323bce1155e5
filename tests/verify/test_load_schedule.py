"""Which requests a load has: the same for the same seed, of mixed length, with shared prefixes."""

from __future__ import annotations

from collections import Counter

from pdserve.verify.load.schedule import GROUPS, Schedule

CHUNK, WINDOW, LONGEST = 256, 50, 1500


def schedule(sample: float = 0.25) -> Schedule:
    pool = tuple(range(100, 1100))
    return Schedule(pool, chunk=CHUNK, longest=LONGEST, model_limit=2000, window=WINDOW, sample=sample, seed=0)


def test_the_same_seed_plans_the_same_requests_in_any_order() -> None:
    assert [schedule().planned(number) for number in reversed(range(400))] == PLANNED[::-1]


def test_each_prompt_has_the_prefix_of_its_group_and_a_tail() -> None:
    prefixes = [schedule().prefix(group) for group in range(GROUPS)]
    assert sorted({len(prefix) for prefix in prefixes}) == [CHUNK, 2 * CHUNK]
    assert len({prefix[:CHUNK] for prefix in prefixes}) == GROUPS
    for request in PLANNED:
        prefix = prefixes[request.group]
        assert request.prompt[: len(prefix)] == prefix
        assert len(prefix) < len(request.prompt) <= LONGEST


def test_each_window_begins_with_an_answered_prompt_of_each_group() -> None:
    """They reload the prefixes, which the proof counts, and the first of them is always compared."""
    for first in range(0, 400, WINDOW):
        begin = PLANNED[first : first + GROUPS]
        assert [request.group for request in begin] == list(range(GROUPS))
        assert {request.ending for request in begin} == {"whole"}
        assert PLANNED[first].compared


def test_some_prompts_come_again_some_requests_are_left_and_a_share_is_compared() -> None:
    assert sum(count - 1 for count in Counter(request.prompt for request in PLANNED).values()) > 20
    endings = Counter(request.ending for request in PLANNED)
    assert min(endings["left-after-first-chunk"], endings["left-before-first-byte"]) > 5
    assert endings["whole"] > 300
    assert 60 < sum(request.compared for request in PLANNED) < 140
    assert sum(schedule(sample=1).planned(number).compared for number in range(400)) == endings["whole"]


PLANNED = [schedule().planned(number) for number in range(400)]
