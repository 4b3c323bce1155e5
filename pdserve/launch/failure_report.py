"""failure.md: the report that a failed deployment leaves: cause first, then the evidence."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pdserve.errors import PdserveError
from pdserve.printable import printable
from pdserve.run.state import DeploymentState

_LAST_EVENTS = 40
_LEFT_OUT = ("at", "event", "error", "patches", "processes")


def report(error: PdserveError, name: str, state: DeploymentState | None, events: Sequence[Mapping[str, Any]]) -> str:
    """Markdown. `state` None: it failed before anything was started."""
    return printable("\n".join(_lines(error, name, state, events))) + "\n"


def _lines(
    error: PdserveError, name: str, state: DeploymentState | None, events: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    yield f"# {name} failed"
    yield ""
    yield f"**{error.what}**"
    yield ""
    yield from (
        f"- {title}: {text}"
        for title, text in (("where", error.where), ("likely cause", error.cause), ("what to do", error.todo))
        if text
    )
    yield f"- when: {time.strftime('%Y-%m-%d %H:%M:%S %z')}; exit code {error.exit_code}"
    if error.evidence:
        yield from ("", "## Evidence", "")
        yield from (f"    {line}" for line in error.evidence)
    if state is not None and state.processes:
        yield from ("", "## Processes", "", "| process | node | state | why |", "| --- | --- | --- | --- |")
        for process, status in state.processes.items():
            yield f"| {process} | {status.node} | {status.phase} | {status.note.replace('|', '/')} |"
    if events:
        yield from (
            "",
            f"## The last of what happened (the rest: events.jsonl, events.jsonl.1; {len(events)} lines)",
            "",
        )
        began = events[0]["at"] if state is None else state.started_at
        for event in events[-_LAST_EVENTS:]:
            fields = " ".join(f"{key}={value}" for key, value in event.items() if key not in _LEFT_OUT)
            yield f"    {event['at'] - began:8.3f} s  {event['event']:<12} {fields}"[:300]
