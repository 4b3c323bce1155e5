"""Whether the load cap can be applied here without the admission gate, and what would happen."""

from __future__ import annotations

import json

from pdserve.patches.record import begin
from pdserve.patches.scheduler import admission_gate
from tests.upstream.probes.lmcache_engine import upstream_module
from tests.upstream.probes.lmcache_reload import Workload, applied

SEEDS = (116, 134, 146, 200, 291)
"""Workloads with a cap that deadlock on vllm 0.22.1."""


def deadlocks() -> int:
    return [Workload(seed).run() for seed in SEEDS].count("deadlock")


def main() -> None:
    upstream_module()
    without = {"answer": applied(), "deadlocks": deadlocks()}
    begin().active.append(admission_gate.PATCH.name)
    admission_gate.apply()
    print(json.dumps({"without": without, "with": {"answer": applied(), "deadlocks": deadlocks()}}))


if __name__ == "__main__":
    main()
