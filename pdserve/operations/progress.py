"""Where a verb reports what it does: the command line gives it a terminal, another caller what it likes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from pdserve.plan.model import Plan
from pdserve.run.directory import RunDir


class VerbProgress(Protocol):
    """What a verb has to report, in the order in which it happens."""

    def warn(self, warnings: Iterable[str]) -> None:
        """Each warning once."""

    def note(self, *lines: str) -> None:
        """Facts on the way to a start."""

    def result(self, line: str) -> None:
        """What the verb has done."""

    def begin(self, run: RunDir, plan: Plan) -> None:
        """From now on events of this run follow."""

    def event(self, event: dict[str, Any]) -> None:
        """One event of the run's history."""

    def end(self, *, detached: bool) -> None:
        """No event follows."""
