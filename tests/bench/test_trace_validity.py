"""The checks where a trace decides what was asked for, and where a time ends it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pdserve.bench.result import Window
from pdserve.bench.sampling import Sample, cpu_use
from pdserve.bench.validity import Evidence, judge
from pdserve.bench.workload import Load, Workload
from tests.bench.evidence import INPUT, OUTPUT, REQUESTS, TOKENS, healthy, record
from tests.tables import each_row


def traced(**changes: Any) -> Evidence:
    """A trace with lengths, all of which were kept."""
    records = [replace(each, asked_output=OUTPUT) for each in healthy().records]
    values = {"workload": Workload(trace="t.jsonl"), "records": records, "asked_input": TOKENS}
    return healthy(**(values | changes))


def broken(evidence: Evidence) -> set[str]:
    return {reason.check for reason in judge(evidence).reasons}


def unchecked(evidence: Evidence) -> set[str]:
    return {reason.check for reason in judge(evidence).unchecked}


def test_a_trace_that_was_kept_is_valid() -> None:
    assert (broken(traced()), unchecked(traced())) == (set(), set())


def test_an_answer_of_another_length_than_its_turn_asks_for_is_invalid() -> None:
    records = [record(asked_output=OUTPUT), record(asked_output=OUTPUT + 1)]
    evidence = traced(records=records, load=Load(requests=2, concurrency=1))
    assert "output-length" in broken(evidence)


@each_row("asked, wrong", [(TOKENS - 1200, False), (TOKENS // 2, True), (TOKENS * 2, True)])
def test_prompts_may_differ_by_what_a_template_adds(asked: int, wrong: bool) -> None:
    assert ("prompt-length" in broken(traced(asked_input=asked))) == wrong


def test_a_trace_of_text_has_no_lengths_to_compare() -> None:
    assert "prompt-length" in unchecked(traced(asked_input=None))


def test_the_rate_of_sessions_is_not_judged() -> None:
    assert "rate" in unchecked(traced(load=Load(requests=REQUESTS, rate=99.0)))


def test_when_the_time_is_over_fewer_requests_are_right_and_open_ones_did_not_fail() -> None:
    timed = Load(requests=99, concurrency=4, seconds=5, grace_seconds=0.1)
    assert "client" in broken(traced(load=timed.model_copy(update={"seconds": None})))
    cut = record(ok=False, cut=True, output_tokens=0, prompt_tokens=0)
    evidence = traced(load=timed, records=[*traced().records, cut])
    assert not broken(evidence)
    assert "errors" in broken(traced(load=timed, records=[*traced().records, replace(cut, cut=False)]))


def test_prompts_that_the_time_left_unsent_are_not_missed() -> None:
    """Of five times as many: the trace's lengths are of all of them."""
    timed = Load(requests=5 * REQUESTS, concurrency=4, seconds=5)
    evidence = traced(load=timed, asked_input=5 * TOKENS)
    assert not broken(evidence)
    assert "prompt-length" in unchecked(evidence)


def test_the_longest_prompt_of_a_trace_decides_what_a_cache_has_to_store() -> None:
    assert traced().longest_prompt == INPUT
    assert healthy().longest_prompt == INPUT


def test_the_hit_on_prefill_is_what_was_not_computed() -> None:
    assert Window(prefill={"computed": 25.0, "local_hits": 50.0, "received": 25.0}).prefix_hit == 0.75
    assert Window(prefill={"computed": 25.0}).prefix_hit is None


def test_only_processes_that_take_times_can_saturate_a_client() -> None:
    records = [record(started=0.0, e2e=10.0)]
    samples = [Sample(0.0, 0.0, {1: 0.0, 2: 0.0}, None), Sample(10.0, 5.0, {1: 2.0, 2: 9.9}, None)]
    assert cpu_use(samples, records)[0].wanted == pytest.approx(0.99)
    assert cpu_use(samples, records, timing={1})[0].wanted == pytest.approx(0.2)
    assert cpu_use(samples, records, timing={3})[0].wanted is None
