"""MultiConnector chooses by tokens x load_weight and never waits in vain: the real class in the real Scheduler."""

from __future__ import annotations

from typing import Any

import pytest

from tests.upstream.multiconnector import measured
from tests.upstream.run import VLLM_VERSIONS

pytestmark = [pytest.mark.upstream, pytest.mark.parametrize("version", VLLM_VERSIONS)]


def measured_case(version: str, case: str) -> tuple[Any, Any]:
    """What upstream does, and what ours does."""
    both = measured(version)["selection"][case]
    return both["upstream"], both["ours"]


def test_the_first_child_with_tokens_always_loads_unless_they_are_weighed(version: str) -> None:
    upstream, ours = measured_case(version, "weights")
    first = {"more tokens": 32, "equal": 48, "weight": 48, "weight that does not suffice": 48, "zero": 48}
    assert upstream == {case: {"a": tokens, "b": 0} for case, tokens in first.items()}
    assert ours == {
        "more tokens": {"a": 0, "b": 48},
        "equal": {"a": 48, "b": 0},
        "weight": {"a": 0, "b": 32},
        "weight that does not suffice": {"a": 48, "b": 0},
        "zero": {"a": 0, "b": 16},
    }


def test_a_child_without_an_answer_holds_the_others_up_unless_it_is_overtaken(version: str) -> None:
    upstream, ours = measured_case(version, "pending")
    held_up = {"steps": None, "loaded": {"a": 0, "b": 0}, "left": {}}
    assert upstream["other has tokens"] == held_up
    assert ours["other has tokens"] == {"steps": 1, "loaded": {"a": 0, "b": 48}, "left": {}}


def test_a_child_without_an_answer_is_waited_for_when_no_other_has_tokens(version: str) -> None:
    upstream, ours = measured_case(version, "pending")
    held_up = {"steps": None, "loaded": {"a": 0, "b": 0}, "left": {}}
    assert upstream["nobody has tokens"] == ours["nobody has tokens"] == held_up


def test_while_no_child_has_tokens_only_a_child_without_an_answer_is_asked_again(version: str) -> None:
    """In the end the others are, too: what they said may be old by then."""
    upstream, ours = measured_case(version, "polls")
    assert upstream == {"asked": {"a": 6, "b": 6}, "a": 0, "b": 48}
    assert ours == {"asked": {"a": 2, "b": 6}, "a": 0, "b": 48}


def test_a_child_with_more_weight_is_waited_for_and_not_for_ever(version: str) -> None:
    upstream, ours = measured_case(version, "pending")
    assert ours["heavier answers soon"] == {"steps": 4, "loaded": {"a": 32, "b": 0}, "left": {}}
    assert upstream["heavier never answers"]["steps"] is None
    assert ours["heavier never answers"] == {"steps": 2, "loaded": {"a": 0, "b": 48}, "left": {}}


def test_a_choice_that_no_longer_holds_is_kept_by_upstream_and_dropped_here(version: str) -> None:
    upstream, ours = measured_case(version, "stale")
    assert upstream["starving"] == ours["starving"] == {"status": "WAITING", "choices": {"r": 0}}
    assert upstream["after"] == {"status": "WAITING", "choices": {"r": 0}}
    assert ours["after"] == {"status": "WAITING", "choices": {}}
    assert (ours["end"], ours["free"]) == ({}, 7)


def test_nothing_is_left_after_aborts_preemptions_and_ends(version: str) -> None:
    _, ours = measured_case(version, "wear")
    assert ours == {"unfinished": [], "left": {}, "missing blocks": 0, "preempted": True, "loads": True}


def test_upstream_still_counts_who_has_to_finish_saving(version: str) -> None:
    upstream, ours = measured_case(version, "async_saves")
    assert ours == upstream == {"extra": {"r": 1}, "held": True, "left": {}, "still": {}}


def test_hybrid_models_are_allowed_as_with_upstreams_class(version: str) -> None:
    upstream, ours = measured_case(version, "hybrid")
    assert ours == upstream
    assert (ours["class"], ours["all support"], ours["groups"]) == ("MultiConnector", True, 2)


def test_the_code_that_it_overrides_is_known(version: str) -> None:
    assert measured(version)["selection"]["verdict"] == "apply"


def test_what_it_does_is_counted(version: str) -> None:
    effects = measured(version)["selection"]["effects"]
    assert {"instances", "chosen-by-weight", "pending-lookups-overtaken", "stale-choices-dropped"} <= set(effects)
