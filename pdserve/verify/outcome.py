"""What a proof returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pdserve.verify.report import Number, Numbers, Status


@dataclass(frozen=True)
class Outcome:
    """Status, numbers and, unless proven, the reason and where to look."""

    status: Status
    numbers: Numbers = field(default_factory=dict)
    reason: str = ""
    goes_on: bool = False
    """Not proven, and yet the proofs that rest on it can be carried out."""


def proven(numbers: Mapping[str, Number]) -> Outcome:
    return Outcome("proven", dict(numbers))


def failed(reason: str, numbers: Mapping[str, Number], *, goes_on: bool = False) -> Outcome:
    return Outcome("failed", dict(numbers), reason, goes_on)


def not_proven(reason: str, numbers: Mapping[str, Number] | None = None, *, goes_on: bool = False) -> Outcome:
    return Outcome("not-proven", dict(numbers or {}), reason, goes_on)
