"""Results of `bench` that a sweep has made. What the sweep itself objects to is not in them: the record of their point,
which is beside their folder, has it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pdserve.bench.result import BenchResult
from pdserve.bench.validity import BenchVerdict, Reason
from pdserve.sweep.record import POINT, PointRecord, read_point

_REPEATS = "repeats"
"""The check that some were not made: no fault of those that were."""


def point_of(folder: Path) -> PointRecord | None:
    """Of the point whose result is in this folder. None: it is of no sweep, or the point was measured again and has
    another result. Raises StateError for a record that cannot be read."""
    place = folder.resolve()
    file = place.parent / POINT
    if not file.is_file():
        return None
    record = read_point(file)
    return record if record.result == place.name else None


def own(of_point: Sequence[Reason], of_measurements: Sequence[Sequence[Reason]]) -> tuple[Reason, ...]:
    """What the sweep has added to the verdicts of its measurements."""
    return tuple(reason for reason in of_point if not any(reason in some for some in of_measurements))


def judged(result: BenchResult, record: PointRecord | None) -> BenchResult:
    """With what the sweep objects to at each measurement. Repeats that were not made are named by `missing`."""
    wrong = [reason for reason in _added(result, record) if reason.check != _REPEATS]
    if not wrong:
        return result
    measurements = [
        each.model_copy(
            update={
                "verdict": BenchVerdict(
                    status="INVALID", reasons=(*each.verdict.reasons, *wrong), unchecked=each.verdict.unchecked
                )
            }
        )
        for each in result.measurements
    ]
    return result.model_copy(update={"measurements": tuple(measurements)})


def missing(name: str, result: BenchResult, record: PointRecord | None) -> tuple[str, ...]:
    """That repeats were not made, in a line. `name`: what the result is called."""
    texts = [reason.text for reason in _added(result, record) if reason.check == _REPEATS]
    return tuple(f"{name} lacks repeats, by which its point is INVALID ({_REPEATS}): {text}" for text in texts)


def _added(result: BenchResult, record: PointRecord | None) -> tuple[Reason, ...]:
    return () if record is None else own(record.reasons, [each.verdict.reasons for each in result.measurements])
