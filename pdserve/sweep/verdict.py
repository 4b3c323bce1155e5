"""What the record of a point has of how its measurement ended. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdserve.bench.result import BenchResult
from pdserve.bench.validity import Reason
from pdserve.errors import PdserveError
from pdserve.sweep.own import OwnDeployment
from pdserve.sweep.points import Point
from pdserve.sweep.record import PointRecord, reasons_of


def measured(
    point: Point,
    result: BenchResult,
    own: OwnDeployment,
    caches: Mapping[str, str],
    *,
    attempt: str,
    start_seconds: float | None,
    seconds: float,
) -> PointRecord:
    """Its verdict: that of each measurement, all of them made, and by the deployment that was started for it. `caches`:
    what became of them before."""
    wrong, unchecked = map(list, reasons_of(result))
    other = own.not_measured_by(result)
    if other is not None and other.check not in {reason.check for reason in wrong}:
        wrong.append(other)
    if len(result.measurements) < point.workload.repeats:
        text = f"{len(result.measurements)} of {point.workload.repeats} repeats were made"
        wrong.append(Reason(check="repeats", text=text))
    return record_of(
        point,
        wrong,
        unchecked,
        caches=caches,
        result=attempt,
        run_id=result.provenance.run_id,
        start_seconds=start_seconds,
        seconds=seconds,
    )


def failed(point: Point, check: str, error: PdserveError, *, run_id: str | None, seconds: float = 0.0) -> PointRecord:
    """Of a point without a result."""
    return record_of(point, [Reason(check=check, text=error.render())], [], run_id=run_id, seconds=seconds)


def record_of(
    point: Point,
    wrong: Sequence[Reason],
    unchecked: Sequence[Reason],
    *,
    run_id: str | None,
    seconds: float,
    caches: Mapping[str, str] | None = None,
    result: str | None = None,
    start_seconds: float | None = None,
) -> PointRecord:
    """INVALID where anything is wrong."""
    return PointRecord(
        id=point.id,
        settings=point.deployment.settings,
        workload=point.workload,
        load=point.load,
        status="INVALID" if wrong else "VALID",
        reasons=tuple(wrong),
        unchecked=tuple(unchecked),
        caches=caches or {},
        result=result,
        run_id=run_id,
        start_seconds=start_seconds,
        seconds=seconds,
    )
