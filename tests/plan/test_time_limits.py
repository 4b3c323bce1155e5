"""Who waits for a launcher waits at least as long as the plan lets it work."""

from __future__ import annotations

from typing import Any

from pdserve.plan.model import Plan
from pdserve.plan.time_limits import apply_seconds, down_seconds, restart_seconds
from tests.plan.kit import plan, recipe, with_lmcache
from tests.tables import each_row

PATIENT = 7 * 3600.0
DRAIN, STOP = {"proxy": {"drain_seconds": PATIENT}}, {"timeouts": {"stop_seconds": PATIENT, "canary_seconds": 1}}


def planned(*changes: dict[str, Any]) -> Plan:
    return plan(recipe(with_lmcache(), *changes))


USUAL = planned()


@each_row("change", [DRAIN, STOP])
def test_a_stop_may_take_what_the_slowest_of_each_stage_may(change: dict[str, Any]) -> None:
    made = planned(change)
    stages = {process.stop_stage for process in made.processes}
    slowest = [max(p.stop_seconds for p in made.processes if p.stop_stage == stage) for stage in stages]
    assert max(slowest) >= PATIENT
    assert down_seconds(made) > sum(slowest) + made.timeouts.stop_seconds, "a command of `pdserve run` ends before them"
    for name in ("prefill-0", "decode-0", "lmcache-0", "proxy"):
        assert restart_seconds(made, name) > PATIENT


@each_row(
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
)
def test_a_change_may_take_all_stages_of_a_start_and_its_proofs(change: dict[str, Any]) -> None:
    made = planned(change)
    starts = {process.start_stage for process in made.processes}
    slowest = [max(p.ready_seconds for p in made.processes if p.start_stage == stage) for stage in starts]
    assert apply_seconds(USUAL, made) > sum(slowest) + made.timeouts.attach_seconds + made.canary_seconds
    assert apply_seconds(USUAL, made) > PATIENT


def test_and_before_it_the_stop_of_what_ran() -> None:
    assert apply_seconds(planned(STOP), USUAL) - apply_seconds(USUAL, USUAL) > PATIENT


@each_row("key", ["engine_seconds", "attach_seconds", "canary_seconds"])
def test_a_restart_of_a_cache_server_brings_its_engines_back_one_after_the_other(key: str) -> None:
    made = planned({"timeouts": {key: PATIENT}, "prefill": {"instances": 3}})
    assert restart_seconds(made, "lmcache-0") > 3 * PATIENT


def test_an_engine_waits_for_its_cache_server_and_for_a_restart_that_is_on_its_way_already() -> None:
    assert restart_seconds(planned({"timeouts": {"lmcache_seconds": PATIENT}}), "prefill-0") > PATIENT
    again = {"policy": "on-failure", "max": 4, "backoff_max_seconds": 100}
    made = planned({"decode": {"restart": again}, "timeouts": {"engine_seconds": PATIENT}})
    assert restart_seconds(made, "decode-0") > 4 * (PATIENT + 100)


def test_what_the_plan_does_not_have_is_refused_at_once() -> None:
    assert restart_seconds(planned({"timeouts": {"engine_seconds": PATIENT}}), "decode-7") < PATIENT
