"""Who loads: the arithmetic of it, and what becomes of lookups that were not waited for. No engine is needed."""

from __future__ import annotations

import inspect
import sys
from types import FrameType
from typing import Any

import pytest

from pdserve.connectors.selection import ChildAnswer, ChildChoice, decide, labels, load_weight, patience_seconds
from pdserve.connectors.selection_lookups import GIVE_UP_SECONDS, LookupKeeper, keep_lookups
from pdserve.patches import effects

pytestmark = pytest.mark.process

PENDING = ChildAnswer(None, False)


def hit(tokens: int) -> ChildAnswer:
    return ChildAnswer(tokens, True)


def test_the_most_tokens_times_weight_win_and_the_first_of_equal_ones() -> None:
    rows: tuple[tuple[list[ChildAnswer], list[float], int | None], ...] = (
        ([hit(32), hit(48)], [1, 1], 1),
        ([hit(48), hit(48)], [1, 1], 0),
        ([hit(48), hit(32)], [1, 2], 1),
        ([hit(48), hit(32)], [1, 1.5], 0),
        ([hit(0), hit(16)], [9, 1], 1),
        ([hit(16), hit(0)], [0, 1], None),
        ([hit(0), hit(0)], [1, 1], None),
        ([PENDING, hit(16)], [1, 1], 1),
        ([hit(16), PENDING], [2, 1], 0),
    )
    assert [row for row in rows if decide(*row[:2]) != ChildChoice(winner=row[2])] == []


def test_who_has_no_answer_is_waited_for_when_no_other_has_tokens_however_long() -> None:
    for answers in ([PENDING, hit(0)], [hit(0), PENDING], [PENDING, PENDING]):
        assert decide(answers, [1, 1], patient=False) == ChildChoice(wait=True), answers


def test_more_weight_is_worth_a_wait_that_ends() -> None:
    assert decide([hit(512), PENDING], [1, 2]) == ChildChoice(wait=True, impatient=True)
    assert decide([hit(512), PENDING], [1, 2], patient=False) == ChildChoice(winner=0)


def test_a_lookup_that_cannot_be_given_up_is_always_waited_for() -> None:
    assert decide([hit(512), PENDING], [1, 1], unreleasable={1}, patient=False) == ChildChoice(wait=True)
    assert decide([hit(512), PENDING], [1, 1], unreleasable={0}) == ChildChoice(winner=0)


def test_weight_and_patience_have_defaults_and_what_is_no_usable_number_is_refused() -> None:
    for value in (-1, float("nan"), float("inf"), "2", True, None):
        with pytest.raises(ValueError, match="load_weight must be a number"):
            load_weight({"load_weight": value})
    assert (load_weight({}), load_weight({"load_weight": 3})) == (1.0, 3.0)
    assert (patience_seconds({}), patience_seconds({"lookup_patience_seconds": 0})) == (1.0, 0.0)


def test_children_of_one_class_are_distinguished() -> None:
    assert labels(["Mooncake", "LMCache"]) == ("Mooncake", "LMCache")
    assert labels(["Nixl", "LMCache", "Nixl"]) == ("Nixl-0", "LMCache", "Nixl-2")


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


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def kept() -> tuple[LookupKeeper, Adapter, Clock]:
    """After a lookup that was sent and not answered; nothing is counted yet."""
    effects.forget()
    adapter, clock = Adapter(), Clock()
    keeper = LookupKeeper(adapter, "some-patch", clock)
    keeper.maybe_submit_lookup_request("r", token_ids=[1, 2, 3], cache_salt="salt")
    adapter.done.clear()
    return keeper, adapter, clock


Kept = tuple[LookupKeeper, Adapter, Clock]


def test_a_lookup_that_was_answered_is_the_connectors_own_business(kept: Kept) -> None:
    keeper, adapter, _ = kept
    keeper.scheduled("r", answered=True)
    keeper.cleanup_lookup_result("r")
    keeper.finished("r")
    keeper.end_session("r")
    keeper.settle()
    assert adapter.done == [("cleanup", "r"), ("end", "r")]
    assert keeper.unsettled == 0


def test_the_locks_of_an_unanswered_one_are_given_back_before_its_session_ends(kept: Kept) -> None:
    keeper, adapter, _ = kept
    keeper.scheduled("r", answered=False)
    keeper.cleanup_lookup_result("r")
    keeper.end_session("r")
    keeper.settle()
    assert (adapter.done, keeper.unsettled) == ([], 1)
    adapter.answer = 2
    keeper.settle()
    assert adapter.done == [("free", "r", 0, 2, 3, "salt"), ("cleanup", "r"), ("end", "r")]
    assert effects.totals() == {("some-patch", "lookups-released"): 1}


def test_a_miss_has_no_locks(kept: Kept) -> None:
    keeper, adapter, _ = kept
    keeper.finished("r")
    adapter.answer = 0
    keeper.settle()
    assert (adapter.done, effects.totals()) == ([("cleanup", "r")], {})


def test_a_request_that_asks_again_gets_its_lookup_back(kept: Kept) -> None:
    keeper, adapter, _ = kept
    keeper.scheduled("r", answered=False)
    keeper.maybe_submit_lookup_request("r", token_ids=[1, 2, 3, 4])
    adapter.answer = 2
    keeper.settle()
    assert adapter.done == [("submit", "r")]
    keeper.finished("r")
    keeper.settle()
    assert adapter.done[1:] == [("free", "r", 0, 2, 3, "salt"), ("cleanup", "r")]


def test_what_was_asked_for_is_known_by_name_however_it_was_passed() -> None:
    adapter = Adapter()
    keeper = LookupKeeper(adapter, "some-patch", Clock())
    keeper.maybe_submit_lookup_request("positional", [1, 2], "salt")
    keeper.maybe_submit_lookup_request(cache_salt="salt", token_ids=[1, 2], request_id="named")
    adapter.answer = 2
    for name in ("positional", "named"):
        keeper.finished(name)
    keeper.settle()
    freed = [entry for entry in adapter.done if entry[0] == "free"]
    assert freed == [("free", name, 0, 2, 2, "salt") for name in ("positional", "named")]


def test_an_adapter_of_lmcache_0_5_6_gets_every_argument_by_position_and_by_name() -> None:
    asked: list[tuple[object, ...]] = []

    class Newer(Adapter):
        def maybe_submit_lookup_request(
            self,
            request_id: str,
            token_ids: list[int],
            cache_salt: str = "",
            request_configs: dict[str, str] | None = None,
            reserve_last_token: bool = False,
        ) -> None:
            asked.append((request_id, token_ids, cache_salt, request_configs, reserve_last_token))

    adapter = Newer()
    keeper = LookupKeeper(adapter, "some-patch", Clock())
    keeper.maybe_submit_lookup_request("r", [1, 2], "salt", {"a": "b"}, True)
    keeper.maybe_submit_lookup_request("r", token_ids=[1, 2])
    assert asked == [("r", [1, 2], "salt", {"a": "b"}, True), ("r", [1, 2], "", None, False)]
    adapter.answer = 2
    keeper.finished("r")
    keeper.settle()
    assert ("free", "r", 0, 2, 2, "salt") in adapter.done


def test_no_poll_of_a_pending_lookup_looks_at_a_signature() -> None:
    """The scheduler polls each of them in every step: with 200 pending ones that took 42 % of a step."""
    keeper = LookupKeeper(Adapter(), "some-patch", Clock())
    calls: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename == inspect.__file__:
            calls.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        for _ in range(2):
            for number in range(200):
                keeper.maybe_submit_lookup_request(f"r{number}", token_ids=[1, 2, 3], cache_salt="salt")
                keeper.check_lookup_result(f"r{number}")
            keeper.settle()
    finally:
        sys.setprofile(before)
    assert calls == []


def test_while_no_child_has_tokens_a_poll_makes_no_new_decision() -> None:
    """It is the answer to nearly every poll."""
    for answers in ([PENDING, hit(0)], [hit(0), hit(0)]):
        assert decide(answers, [1, 2]) is decide(answers, [2, 1], unreleasable={0}, patient=False)
        assert decide(answers, [1, 2]) == ChildChoice(wait=answers[0].tokens is None)


def test_one_without_an_answer_for_a_minute_is_left_to_the_servers_time_limit(kept: Kept) -> None:
    keeper, adapter, clock = kept
    keeper.finished("r")
    keeper.end_session("r")
    clock.now = GIVE_UP_SECONDS
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
