"""What upstream's scheduler does without and with our patches of it; in one process, because vllm takes long to import.

Once a patch is applied it stays, so the order is: without any, with the guard alone, with all.
"""

from __future__ import annotations

import json
from typing import Any

from tests.upstream.probes import failed_loads, simulation, stale_completions

UNPATCHED_RUNS = 50
PATCHED_RUNS = 150


def main() -> None:
    results: dict[str, Any] = {
        "loaded_go_first": simulation.loaded_go_first(),
        "stale_completions": {"unpatched": stale_completions.look()},
        "failed_loads": {
            "unpatched": failed_loads.look() if simulation.reports_failed_loads() else None,
            "offered_again": {"unpatched": failed_loads.look_again()},
        },
        "simulation": {"unguarded": simulation.unguarded(UNPATCHED_RUNS)},
    }
    stale_completions.patch()
    results["stale_completions"]["patched"] = stale_completions.look()
    results["stale_completions"]["others"] = stale_completions.seen_by_wrappers()
    results["simulation"]["guarded"] = simulation.guarded(UNPATCHED_RUNS)
    results["simulation"]["patched"] = simulation.patched(PATCHED_RUNS)
    results["failed_loads"]["offered_again"]["patched"] = failed_loads.look_again()
    if simulation.reports_failed_loads():
        results["failed_loads"]["patched"] = [failed_loads.look(), failed_loads.look("priority")]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
