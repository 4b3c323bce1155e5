"""The verdict on a point: that of its measurements, all repeats made, by the sweep's own deployment."""

from __future__ import annotations

from pdserve.bench.result import BenchResult, Window
from pdserve.bench.workload import Load, Workload
from pdserve.sweep.file import Point, Variant
from pdserve.sweep.record import OwnDeployment, PointRecord
from pdserve.sweep.record import measured as judged_point
from tests.bench.evidence import healthy
from tests.bench.test_compare import INVALID, measured, result
from tests.tables import each_row

OWN = OwnDeployment(run_id=healthy().before.run_id, plan=healthy().before.plan)
COLD = {"computed": 10.0, "local_hits": 0.0, "received": 0.0}


def judged(*windows: Window, repeats: int | None = None) -> PointRecord:
    measurements = [measured(0.1).model_copy(update={"window": window}) for window in windows]
    return record_for(result(*measurements), repeats or len(windows))


def record_for(some: BenchResult, repeats: int) -> PointRecord:
    workload = Workload(input_tokens=10, output_tokens=5, repeats=repeats)
    point = Point(Variant((), "d"), workload, Load(requests=20, concurrency=4))
    return judged_point(point, some, OWN, {}, attempt="a", start_seconds=None, seconds=1.0)


def test_valid_measurements_make_a_valid_point() -> None:
    record = judged(Window(prefill=COLD, decode={"received": 10.0, "local_hits": 0.0}))
    assert (record.status, record.reasons, record.unchecked) == ("VALID", (), ())


def test_a_repeat_that_was_not_made_is_invalid() -> None:
    record = judged(Window(prefill=COLD), repeats=3)
    assert [reason.text for reason in record.reasons] == ["1 of 3 repeats were made"]


def test_an_invalid_repeat_makes_the_point_invalid() -> None:
    record = record_for(result(measured(0.1), measured(0.1, INVALID)), 2)
    assert record.status == "INVALID"
    assert record.reasons[0].check == "errors"


@each_row("change, said", [({"run_id": "theirs"}, "another run serves now: theirs"), ({"plan": "x"}, "another plan")])
def test_another_deployment_is_invalid_from_the_beginning(change: dict[str, str], said: str) -> None:
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
