"""Requests that wait for external KV: four probes in one process, first as upstream is, then with the patches.

`python -m ... VERSION PATCHES WORKLOADS SEED`: of vLLM; the patches by module, comma-separated, in the order in which
they are applied (one that this version does not need is left out); random workloads with LMCache, and their seed.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

from pdserve.patches.patch import in_range
from tests.upstream.probes import failed_group, late_loads, load_timeout, ready_waiters


def main() -> None:
    version, patches, workloads, seed = sys.argv[1], sys.argv[2].split(","), int(sys.argv[3]), int(sys.argv[4])
    facts: dict[str, dict[str, Any]] = {
        "failed_group": {"unpatched": failed_group.unpatched()},
        "late_loads": {"unpatched": late_loads.unpatched()},
        "load_timeout": {"unpatched": load_timeout.unpatched()},
        "ready_waiters": {"unpatched": ready_waiters.unpatched()},
    }
    applied = []
    for name in patches:
        patch = importlib.import_module(f"pdserve.patches.scheduler.{name}").PATCH
        if in_range(version, patch.vllm):
            patch.apply()
            applied.append(name)
    facts["load_timeout"]["patched"] = load_timeout.patched()
    facts["late_loads"]["patched"] = late_loads.patched(workloads, seed)
    if "failed_group" in applied:
        facts["failed_group"]["patched"] = failed_group.patched()
    if "ready_waiters_first" in applied:
        facts["ready_waiters"]["patched"] = ready_waiters.patched()
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
