"""Who waits for a launcher waits at least as long as the plan lets it work."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.plan.model import Plan
from pdserve.plan.time_limits import apply_seconds, down_seconds, restart_seconds
from tests.plan.kit import plan, recipe, with_lmcache

PATIENT = 7 * 3600.0


def planned(*changes: dict[str, Any]) -> Plan:
    return plan(recipe(with_lmcache(), *changes))


USUAL = planned()


@pytest.mark.parametrize(
    "change",
    [
        {"proxy": {"drain_seconds": PATIENT}},
        {"timeouts": {"stop_seconds": PATIENT}},
    ],
    ids=["drain", "stop"],
)
def test_a_stop_may_take_what_the_slowest_of_each_stage_may(change: dict[str, Any]) -> None:
    made = planned(change)
    stages = {process.stop_stage for process in made.processes}
    slowest = [max(p.stop_seconds for p in made.processes if p.stop_stage == stage) for stage in stages]
    assert max(slowest) >= PATIENT
    assert down_seconds(made) > sum(slowest) + made.timeouts.stop_seconds, "a command of `pdserve run` ends before them"


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"path": None, "id": "org/model"}, "timeouts": {"weights_seconds": PATIENT}},
        {"setup": ["true", "true"], "timeouts": {"setup_seconds": PATIENT / 2}},
        {"timeouts": {"lmcache_seconds": PATIENT}},
        {"timeouts": {"engine_seconds": PATIENT}},
        {"timeouts": {"proxy_seconds": PATIENT}},
        {"timeouts": {"attach_seconds": PATIENT}},
        {"timeouts": {"canary_seconds": PATIENT}},
    ],
    ids=["weights", "setup", "lmcache", "engine", "proxy", "attach", "canary"],
)
def test_a_change_may_take_all_stages_of_a_start_and_its_proofs(change: dict[str, Any]) -> None:
    made = planned(change)
    starts = {process.start_stage for process in made.processes}
    slowest = [max(p.ready_seconds for p in made.processes if p.start_stage == stage) for stage in starts]
    assert apply_seconds(USUAL, made) > sum(slowest) + made.timeouts.attach_seconds + made.canary_seconds
    assert apply_seconds(USUAL, made) > PATIENT


def test_and_before_it_the_stop_of_what_ran() -> None:
    slow = planned({"timeouts": {"stop_seconds": PATIENT}})
    assert apply_seconds(slow, USUAL) - apply_seconds(USUAL, USUAL) > PATIENT


@pytest.mark.parametrize("name", ["prefill-0", "decode-0", "lmcache-0", "proxy"])
@pytest.mark.parametrize(
    "change",
    [{"proxy": {"drain_seconds": PATIENT}}, {"timeouts": {"stop_seconds": PATIENT, "canary_seconds": 1}}],
    ids=["drain", "stop"],
)
def test_a_restart_may_drain_and_stop_first(name: str, change: dict[str, Any]) -> None:
    assert restart_seconds(planned(change), name) > PATIENT


@pytest.mark.parametrize("key", ["engine_seconds", "attach_seconds", "canary_seconds"])
def test_a_restart_of_a_cache_server_brings_its_engines_back_one_after_the_other(key: str) -> None:
    made = planned({"timeouts": {key: PATIENT}, "prefill": {"instances": 3}})
    assert restart_seconds(made, "lmcache-0") > 3 * PATIENT


def test_an_engine_waits_for_its_cache_server() -> None:
    assert restart_seconds(planned({"timeouts": {"lmcache_seconds": PATIENT}}), "prefill-0") > PATIENT


def test_a_restart_waits_for_one_that_is_on_its_way_already() -> None:
    again = {"policy": "on-failure", "max": 4, "backoff_max_seconds": 100}
    made = planned({"decode": {"restart": again}, "timeouts": {"engine_seconds": PATIENT}})
    assert restart_seconds(made, "decode-0") > 4 * (PATIENT + 100)


def test_what_the_plan_does_not_have_is_refused_at_once() -> None:
    assert restart_seconds(planned({"timeouts": {"engine_seconds": PATIENT}}), "decode-7") < PATIENT
