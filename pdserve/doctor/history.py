"""Events of the history as evidence. A record that was edited or torn gives an empty word, or 0, and hides no other."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from pdserve.doctor.diagnosis import EvidenceLine
from pdserve.doctor.records import RunRecords

Event = Mapping[str, Any]
HISTORY = "events.jsonl"
_BEYOND = 1e15
"""No field of ours is that large."""
_NO_FIELDS = ("at", "event")
_ANSWERS = {"died": ("cause", "todo"), "late": ("cause", "todo")}
"""What is said beside the evidence."""


def events_of(records: RunRecords, kind: str) -> list[Event]:
    """The events of one kind, the oldest first."""
    return [event for event in records.events if event.get("event") == kind]


def evidence_of(event: Event) -> EvidenceLine:
    """As a line: its kind and its fields."""
    left_out = (*_NO_FIELDS, *_ANSWERS.get(text(event, "event"), ()))
    fields = " ".join(f"{key}={value}" for key, value in event.items() if key not in left_out)
    return EvidenceLine(HISTORY, clock(event), f"{event.get('event')} {fields}".strip())


def clock(event: Event) -> str:
    """In this machine's time, as logs have theirs."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(number(event, "at")))
    except (OverflowError, ValueError, OSError):
        return ""


def text(event: Event, key: str) -> str:
    """A field as a word."""
    value = event.get(key)
    return "" if value is None else str(value)


def number(event: Event, key: str) -> float:
    """A field as a number."""
    value = event.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0.0
    return float(value) if abs(value) < _BEYOND else 0.0  # nor of NaN
