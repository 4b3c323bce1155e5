"""The report of a load: its proofs, and what happened when."""

from __future__ import annotations

from collections.abc import Collection

from pydantic import BaseModel, ConfigDict

from pdserve.verify.load.traffic import Traffic
from pdserve.verify.report import Report


class LoadWindow(BaseModel):
    """The requests `first` to `last`, in the order in which they were sent."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    first: int
    last: int
    seconds: float
    """Since the load began, when the last of them had ended."""
    answered: int
    cancelled: int
    failed: int
    compared: int
    """Answers that were compared with one engine alone."""
    different: int
    """Of those, other than what the engine alone answers."""


class LoadReport(Report):
    """As Report; `windows` has when in the run answers failed or differed."""

    windows: tuple[LoadWindow, ...] = ()


def make_windows(traffic: Traffic, compared: Collection[int], different: Collection[int]) -> tuple[LoadWindow, ...]:
    """`compared`, `different`: numbers of requests."""
    return tuple(
        LoadWindow(
            first=window.first,
            last=window.last,
            seconds=window.seconds,
            answered=len(window.ended("answered")),
            cancelled=len(window.ended("cancelled")),
            failed=len(window.ended("failed")),
            compared=sum(window.first <= number <= window.last for number in compared),
            different=sum(window.first <= number <= window.last for number in different),
        )
        for window in traffic.windows
    )


def when(traffic: Traffic, of: Collection[int], wrong: Collection[int]) -> str:
    """In which windows: `requests 0-49: 3 of 12; requests 100-149: 6 of 11`. Only windows with wrong ones."""
    parts = []
    for window in make_windows(traffic, of, wrong):
        if window.different:
            parts.append(f"requests {window.first}-{window.last}: {window.different} of {window.compared}")
    return "; ".join(parts)
