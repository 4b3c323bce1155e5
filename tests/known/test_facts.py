"""The one list of what is known of versions."""

from __future__ import annotations

from pdserve.installed.versions import TESTED, Versions
from pdserve.known import DEFECTS, FLAGS, facts
from pdserve.patches.registry import REGISTRY


def test_every_table_is_in_it() -> None:
    every = list(facts())
    assert len(every) == len(DEFECTS) + len(REGISTRY) + len(FLAGS)
    assert all(fact.what and fact.source and fact.todo for fact in every)


def test_what_is_tested_has_nothing_that_is_refused() -> None:
    """Of the versions alone: what a defect needs may not be in use."""
    refused = [
        fact for fact in facts() if fact.kind == "defect, refused" and fact.holds(Versions.model_validate(TESTED))
    ]
    assert refused == []


def test_a_fact_of_two_packages_holds_when_both_have_it() -> None:
    [both] = [fact for fact in facts() if set(fact.versions) == {"vllm", "lmcache"} and fact.kind == "defect, refused"]
    assert both.holds(Versions(vllm="0.21.0", lmcache="0.5.6"))
    assert not both.holds(Versions(vllm="0.26.0", lmcache="0.5.6"))
    assert not both.holds(Versions(vllm="0.21.0"))
