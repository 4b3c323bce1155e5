"""A cause, the lines that show it, and what to do: what `pdserve doctor` answers with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

_SHOWN = 3
"""Lines of evidence that are kept of one cause."""


@dataclass(frozen=True)
class EvidenceLine:
    """One line of a file of the run, or one figure of a live process."""

    source: str
    """The file, relative to the run directory, or where the figure was read: /metrics of prefill-0."""
    at: str
    """When, as the line has it; empty where it has no time."""
    text: str

    def line(self) -> str:
        return f"{self.source}{f' at {self.at}' if self.at else ''}: {self.text}"


@dataclass(frozen=True)
class Diagnosis:
    """One cause."""

    rule: str
    """Its name in docs/doctor.md."""
    processes: tuple[str, ...]
    """Where it was seen; empty: the deployment as a whole."""
    cause: str
    todo: str
    evidence: tuple[EvidenceLine, ...]
    setting: str = ""
    """KEY=VALUE of the recipe, for --set; empty where no key of the recipe removes the cause."""
    times: int = 1
    """How often it was seen."""

    def to_json(self) -> dict[str, Any]:
        """Stable keys."""
        return asdict(self)


def merged(diagnoses: Iterable[Diagnosis]) -> list[Diagnosis]:
    """The same cause of several processes, or of one process several times, is one entry, in the order of the first."""
    kept: dict[tuple[str, str, str, str], Diagnosis] = {}
    for each in diagnoses:
        key = (each.rule, each.cause, each.todo, each.setting)
        before = kept.get(key)
        kept[key] = (
            replace(each, evidence=each.evidence[:_SHOWN])
            if before is None
            else replace(
                before,
                processes=tuple(dict.fromkeys((*before.processes, *each.processes))),
                evidence=(*before.evidence, *each.evidence)[:_SHOWN],
                times=before.times + each.times,
            )
        )
    return list(kept.values())
