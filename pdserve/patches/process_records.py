"""What the patched processes of an engine have written about themselves (record.py), read by others."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError


class PatchRecord(BaseModel):
    """The record of one process (record.py writes it)."""

    model_config = ConfigDict(frozen=True)

    pid: int
    session: int
    process: str
    kind: str
    active: tuple[str, ...]
    allowed_unknown: tuple[str, ...] = ()
    skipped: dict[str, str] = {}
    not_needed: dict[str, str] = {}
    effects: dict[str, dict[str, float]] = {}
    versions: dict[str, str | None] = {}


def read_records(folder: Path) -> list[PatchRecord]:
    """The records of a folder, by pid; one that is gone or unreadable by now is left out.

    So is one of a process that does not serve: vLLM looks at a model's class in a process of its own.
    """
    records = []
    for path in sorted(folder.glob("*.json")):
        try:
            record = PatchRecord.model_validate(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, ValidationError):
            continue
        if record.kind != "other":
            records.append(record)
    return records


def merged_effects(records: Iterable[PatchRecord]) -> dict[str, dict[str, float]]:
    """patch -> effect -> value over all processes."""
    merged: dict[str, dict[str, float]] = {}
    for record in records:
        for patch, counted in record.effects.items():
            for effect, value in counted.items():
                effects = merged.setdefault(patch, {})
                effects[effect] = effects.get(effect, 0) + value
    return merged


def active_in_all(records: Iterable[PatchRecord]) -> tuple[str, ...]:
    """The patches that every process of them has applied; none without a process."""
    active = [set(record.active) for record in records]
    return tuple(sorted(set.intersection(*active))) if active else ()
