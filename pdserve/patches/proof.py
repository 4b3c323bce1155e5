"""The proof that every process of an engine has its patches, from the records that the processes write."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from pdserve.patches.registry import REGISTRY


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
            record = PatchRecord.model_validate(json.loads(path.read_text()))
        except (OSError, ValueError, ValidationError):
            continue
        if record.kind != "other":
            records.append(record)
    return records


def shortcomings(records: Sequence[PatchRecord], patches: Collection[str], workers: int, cores: int) -> list[str]:
    """What keeps an engine from being proven patched, one sentence each; none: it is.

    `patches`: those that it was started with. `workers`: TP x PP x DP; `cores`: DP ranks. A single worker may live in
    EngineCore's own process (vLLM does so on one GPU), and then has no record of its own.
    """
    if not patches:
        return []
    missing_proofs = []
    for kind, at_least in (("api-server", 1), ("engine-core", cores), ("worker", 0 if workers == 1 else workers)):
        number = sum(record.kind == kind for record in records)
        if number < at_least:
            missing_proofs.append(f"{at_least} {kind} process(es) must report their patches, {number} did")
    required = {patch.name for patch in REGISTRY if patch.required} & set(patches)
    spared = {patch.name for patch in REGISTRY if patch.serves_without}
    for record in records:
        left_out = spared & set(record.skipped)
        if missing := sorted(required - left_out - set(record.active) - set(record.not_needed)):
            missing_proofs.append(f"{record.process} (pid {record.pid}) runs without {', '.join(missing)}")
    return missing_proofs


def merged_effects(records: Iterable[PatchRecord]) -> dict[str, dict[str, float]]:
    """patch -> effect -> value over all processes."""
    merged: dict[str, dict[str, float]] = {}
    for record in records:
        for patch, counted in record.effects.items():
            for effect, value in counted.items():
                effects = merged.setdefault(patch, {})
                effects[effect] = effects.get(effect, 0) + value
    return merged
