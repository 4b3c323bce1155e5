"""Who loads: the arithmetic of it, and what becomes of lookups that were not waited for. No engine is needed."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.connectors.selection import ChildAnswer, ChildChoice, decide, load_weight, patience_seconds
from pdserve.connectors.selection_lookups import GIVE_UP_SECONDS, LookupKeeper, keep_lookups
from pdserve.patches import effects
from tests.tables import each_row

pytestmark = pytest.mark.process

PENDING = ChildAnswer(None, False)


def hit(tokens: int) -> ChildAnswer:
    return ChildAnswer(tokens, True)


WAIT = ChildChoice(wait=True)
NO_ANSWER: tuple[list[ChildAnswer], ...] = ([PENDING, hit(0)], [hit(0), PENDING], [PENDING, PENDING])


@each_row(
    "answers, weights, how, expected",
    [
        ([hit(32), hit(48)], [1, 1], {}, ChildChoice(winner=1)),
        ([hit(48), hit(48)], [1, 1], {}, ChildChoice(winner=0)),
        ([hit(48), hit(32)], [1, 2], {}, ChildChoice(winner=1)),
        ([hit(48), hit(32)], [1, 1.5], {}, ChildChoice(winner=0)),
        ([hit(0), hit(16)], [9, 1], {}, ChildChoice(winner=1)),
        ([hit(16), hit(0)], [0, 1], {}, ChildChoice()),
        ([PENDING, hit(16)], [1, 1], {}, ChildChoice(winner=1)),
        ([hit(16), PENDING], [2, 1], {}, ChildChoice(winner=0)),
        *((answers, [1, 1], {"patient": False}, WAIT) for answers in NO_ANSWER),
        ([hit(512), PENDING], [1, 2], {}, ChildChoice(wait=True, impatient=True)),
        ([hit(512), PENDING], [1, 2], {"patient": False}, ChildChoice(winner=0)),
        ([hit(512), PENDING], [1, 1], {"unreleasable": {1}, "patient": False}, WAIT),
        ([hit(512), PENDING], [1, 1], {"unreleasable": {0}}, ChildChoice(winner=0)),
    ],
)
def test_the_most_tokens_times_weight_win_and_a_wait_for_more_ends_where_it_can_be_given_up(
    answers: list[ChildAnswer], weights: list[float], how: dict[str, Any], expected: ChildChoice
) -> None:
    assert decide(answers, weights, **how) == expected


def test_weight_and_patience_have_defaults_and_what_is_no_usable_number_is_refused() -> None:
    for value in (-1, float("nan"), float("inf"), "2", True, None):
        with pytest.raises(ValueError, match="load_weight must be a number"):
            load_weight({"load_weight": value})
    assert (load_weight({}), load_weight({"load_weight": 3})) == (1.0, 3.0)
    assert (patience_seconds({}), patience_seconds({"lookup_patience_seconds": 0})) == (1.0, 0.0)


class Adapter:
    """What LMCache's connector calls of its adapter; `answer` is that of every lookup."""

    def __init__(self) -> None:
        self.answer: int | None = None
        self.done: list[Any] = []
        self.other_attribute = "passed on"

    def maybe_submit_lookup_request(self, request_id: str, token_ids: list[int], cache_salt: str = "") -> None:
        self.done.append(("submit", request_id))

    def check_lookup_result(self, request_id: str) -> int | None:
        return self.answer

    def cleanup_lookup_result(self, request_id: str) -> None:
        self.done.append(("cleanup", request_id))

    def free_lookup_locks(
        self, token_ids: list[int], start: int, end: int, request_id: str, cache_salt: str = ""
    ) -> None:
        self.done.append(("free", request_id, start, end, len(token_ids), cache_salt))

    def end_session(self, request_id: str) -> None:
        self.done.append(("end", request_id))


def kept(now: list[float] | None = None) -> tuple[LookupKeeper, Adapter]:
    """A keeper after a lookup that was sent and not answered; nothing is counted yet. The time is what `now` has."""
    effects.forget()
    adapter, now = Adapter(), now or [0.0]
    keeper = LookupKeeper(adapter, "some-patch", lambda: now[0])
    keeper.maybe_submit_lookup_request("r", token_ids=[1, 2, 3], cache_salt="salt")
    adapter.done.clear()
    return keeper, adapter


def test_the_locks_of_an_unanswered_one_are_given_back_before_its_session_ends() -> None:
    keeper, adapter = kept()
    keeper.scheduled("r", answered=False)
    keeper.cleanup_lookup_result("r")
    keeper.end_session("r")
    keeper.settle()
    assert (adapter.done, keeper.unsettled) == ([], 1)
    adapter.answer = 2
    keeper.settle()
    assert adapter.done == [("free", "r", 0, 2, 3, "salt"), ("cleanup", "r"), ("end", "r")]
    assert effects.totals() == {("some-patch", "lookups-released"): 1}


def test_one_without_an_answer_for_a_minute_is_left_to_the_servers_time_limit() -> None:
    keeper, adapter = kept(now := [0.0])
    keeper.finished("r")
    keeper.end_session("r")
    now[0] = GIVE_UP_SECONDS
    keeper.settle()
    assert adapter.done == [("cleanup", "r"), ("end", "r")]
    assert effects.totals() == {("some-patch", "lookups-left-to-expire"): 1}


def test_a_connector_is_kept_once_and_one_without_such_an_adapter_not_at_all() -> None:
    class Child:
        scheduler_adapter: Any = Adapter()

    child = Child()
    keeper = keep_lookups(child, "some-patch")
    assert keeper is not None
    assert keeper.other_attribute == "passed on"
    assert child.scheduler_adapter is keeper
    assert keep_lookups(child, "some-patch") is keeper
    assert keep_lookups(object(), "some-patch") is None
