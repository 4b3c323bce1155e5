"""The proof that every process of an engine has its patches, from the records that the processes write."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pdserve.patches.process_records import PatchRecord
from pdserve.patches.registry import REGISTRY


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
