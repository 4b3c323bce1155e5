"""Stores of OffloadingConnector whose blocks a load of another child gets, on the real Scheduler."""

from __future__ import annotations

import json
from typing import Any

from pdserve.patches import effects
from pdserve.patches.offloading.foreign_blocks import NAME, NOTED, PATCH
from pdserve.patches.verdict import judge
from tests.upstream.probes.multiconnector_metrics import versions_here
from tests.upstream.scheduler_lab import Lab, mock, multi

PROMPT = 128
OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 30},
}


def reused_blocks() -> dict[str, Any]:
    """One request is stored, and ends before its store has; another one loads into its blocks by the other child."""
    lab = Lab(num_blocks=PROMPT // 16 + 3, max_num_batched_tokens=2 * PROMPT, connector=multi(mock(), OFFLOADING))
    (_, offloading) = lab.connector._connectors
    manager = offloading.connector_scheduler.manager
    if hasattr(manager, "_num_blocks"):
        manager._num_blocks = 1 << 10  # of as many bytes as the lab's layers have, which is none
    lab.add("stored", PROMPT, max_tokens=3)
    jobs: set[int] = set()
    for _ in range(6):
        output = lab.schedule()
        (_, told) = output.kv_connector_metadata.metadata
        jobs |= set(told.store_jobs)
        lab.update(output)
    freed = lab.status("stored") == "GONE"
    lab.add("loads", PROMPT, {"mock": {"matched": PROMPT - 16}})
    output = lab.schedule()
    (_, told) = output.kv_connector_metadata.metadata
    return {
        "freed_before_its_store_ended": freed,
        "stores": len(jobs),
        "loads": [load.request_id for load in lab.book.loads],
        "waited_for": sorted(jobs & set(told.jobs_to_flush or ())) == sorted(jobs),
    }


def main() -> None:
    facts = {"unpatched": reused_blocks()}
    if judge(PATCH, versions_here()).outcome == "apply":
        PATCH.apply()
        PATCH.apply()
        facts["patched"] = reused_blocks() | {"noted": effects.totals()[NAME, NOTED]}
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
