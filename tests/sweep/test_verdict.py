"""The verdict on a point: that of its measurements, all repeats made, on caches that were cold."""

from __future__ import annotations

import pytest

from pdserve.bench.result import BenchResult, Window
from pdserve.bench.traces.trace import TraceFacts
from pdserve.bench.workload import Load, Workload
from pdserve.sweep.cold import CHECK
from pdserve.sweep.own import OwnDeployment
from pdserve.sweep.points import Point, Variant
from pdserve.sweep.record import PointRecord
from pdserve.sweep.run import record_of
from tests.bench.evidence import healthy
from tests.bench.test_compare import INVALID, measured, result

OWN = OwnDeployment(run_id=healthy().before.run_id, plan=healthy().before.plan)
COLD = {"computed": 10.0, "local_hits": 0.0, "received": 0.0}


def judged(*windows: Window, repeats: int | None = None) -> PointRecord:
    measurements = [measured(0.1).model_copy(update={"window": window}) for window in windows]
    return record_for(result(*measurements), repeats or len(windows))


def record_for(some: BenchResult, repeats: int) -> PointRecord:
    workload = Workload(input_tokens=10, output_tokens=5, repeats=repeats)
    point = Point(Variant((), "d"), workload, Load(requests=20, concurrency=4))
    return record_of(point, some, OWN, {}, attempt="a", start_seconds=None, seconds=1.0)


def test_new_prompts_on_cold_caches_are_valid() -> None:
    record = judged(Window(prefill=COLD, decode={"received": 10.0, "local_hits": 0.0}))
    assert (record.status, record.reasons, record.unchecked) == ("VALID", (), ())


def test_random_prompts_may_share_blocks_with_each_other() -> None:
    asked = measured(0.1).figures.input_tokens
    assert judged(Window(prefill=COLD | {"local_hits": 0.4 * asked})).status == "VALID"
    assert judged(Window(prefill=COLD | {"local_hits": 0.6 * asked})).status == "INVALID"


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (COLD | {"local_hits": 900.0}, {}),
        (COLD | {"received": 900.0}, {}),
        (COLD, {"local_hits": 900.0}),
    ],
    ids=["prefix-cache", "cache-tier", "decode"],
)
def test_prompts_that_came_from_a_cache_are_invalid(prefill: dict[str, float], decode: dict[str, float]) -> None:
    record = judged(Window(prefill=COLD), Window(prefill=prefill, decode=decode))
    assert record.status == "INVALID"
    assert [reason.check for reason in record.reasons] == [CHECK]
    assert "900 of" in record.reasons[0].text


def test_engines_that_do_not_count_prove_nothing_and_that_is_named() -> None:
    record = judged(Window())
    assert record.status == "VALID"
    assert [reason.check for reason in record.unchecked] == [CHECK]


def test_a_repeat_that_was_not_made_is_invalid() -> None:
    record = judged(Window(prefill=COLD), repeats=3)
    assert [reason.text for reason in record.reasons] == ["1 of 3 repeats were made"]


def test_an_invalid_repeat_makes_the_point_invalid() -> None:
    record = record_for(result(measured(0.1), measured(0.1, INVALID)), 2)
    assert record.status == "INVALID"
    assert record.reasons[0].check == "errors"


@pytest.mark.parametrize(("hits", "status"), [(0.7, "VALID"), (0.84, "VALID"), (0.9, "INVALID")])
def test_a_trace_may_repeat_itself_as_much_as_it_does_in_theory(hits: float, status: str) -> None:
    """Half of the rest may come from a cache, as with prompts that are all new: of a theory of 70 % that is 85 %."""
    asked = measured(0.1).figures.input_tokens
    warm = Window(prefill=COLD | {"local_hits": hits * asked}, decode={"local_hits": hits * asked})
    about = TraceFacts(
        name="t", digest="0" * 64, format="messages", sessions=1, requests=20, prefix_hit=0.7, estimated=True
    )
    traced = result(measured(0.1).model_copy(update={"window": warm})).model_copy(update={"trace": about})
    assert record_for(traced, 1).status == status


@pytest.mark.parametrize(
    ("change", "said"), [({"run_id": "theirs"}, "another run serves now: theirs"), ({"plan": "x"}, "another plan")]
)
def test_what_another_deployment_has_served_is_invalid_also_where_it_did_not_change_meanwhile(
    change: dict[str, str], said: str
) -> None:
    """As after a `pdserve up --replace` between two repeats: each of the two has seen one plan only."""
    mine = measured(0.1).model_copy(update={"window": Window(prefill=COLD)})
    theirs = mine.model_copy(
        update={each: getattr(mine, each).model_copy(update=change) for each in ("before", "after")}
    )
    assert record_for(result(mine, mine), 2).status == "VALID"
    record = record_for(result(mine, theirs), 2)
    assert record.status == "INVALID"
    assert [reason.check for reason in record.reasons] == ["deployment"]
    assert said in record.reasons[0].text
