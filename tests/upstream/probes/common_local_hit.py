"""Where a request of a model with recurrent state goes on when the KV groups have hits of different lengths."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pdserve.patches import effects
from pdserve.patches.scheduler import common_local_hit
from pdserve.patches.verdict import judge
from tests.upstream.probes.multiconnector_metrics import versions_here
from tests.upstream.scheduler_lab import Lab, mock, multi

BLOCK = 16
CHUNK = 4 * BLOCK
PROMPT = list(range(1000, 1000 + 7 * BLOCK + 1))
"""Its states are kept at the ends of its steps: after 64 tokens and after 112."""
LONGER = [*PROMPT, *range(2000, 2000 + 5 * BLOCK)]
FULL, STATE = 0, 1
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}


def second(evicted: Mapping[int, slice], offered: int = 0) -> dict[str, Any]:
    """A request that goes on from what a first one has left. `evicted`: of each group which of its blocks are gone.
    `offered`: tokens that the connector has."""
    lab = Lab(block_size=BLOCK, max_num_batched_tokens=CHUNK, recurrent_state=True)
    lab.add("first", PROMPT, max_tokens=1)
    blocks: dict[int, dict[int, int]] = {FULL: {}, STATE: {}}
    for _ in range(3):
        output = lab.schedule()
        for group, seen in blocks.items():
            seen.update((at, block) for at, block in enumerate(lab.blocks("first", group)) if block)
        lab.update(output)
    assert lab.status("first") == "GONE"
    for group, which in evicted.items():
        lab.pool.evict_blocks({block for at, block in blocks[group].items() if at in range(7)[which]})
    lab.add("second", LONGER, {"mock": {"matched": offered}})
    try:
        output = lab.schedule()
    except Exception as error:  # noqa: BLE001  # whatever ends EngineCore
        return {"dies_of": type(error).__name__}
    if lab.book.loads:
        return {"loads": lab.book.loads[0].tokens}
    (new,) = output.scheduled_new_reqs
    at = new.num_computed_tokens
    return {"goes_on_at": at, "has_a_state": at == 0 or bool(lab.blocks("second", STATE)[at // BLOCK - 1])}


NOTHING: dict[int, slice] = {}
CASES: dict[str, tuple[Mapping[int, slice], int]] = {
    "nothing is evicted": (NOTHING, 0),
    "no state is left": ({STATE: slice(None)}, 0),
    "the last state is evicted": ({STATE: slice(4, None)}, 0),
    "full attention is evicted behind 32 tokens": ({FULL: slice(2, None)}, 0),
    "no state is left, 160 tokens are offered": ({STATE: slice(None)}, 160),
    "nothing is evicted, 160 tokens are offered": (NOTHING, 160),
}


def look() -> dict[str, Any]:
    return {name: second(*case) for name, case in CASES.items()}


def is_common(connector: Mapping[str, Any]) -> bool:
    """Whether the patch takes the common hit with that connector."""
    lab = Lab(block_size=32, recurrent_state=True, connector=connector)
    return bool(getattr(lab.scheduler.kv_cache_manager.coordinator, "pdserve_common_hit", False))


def main() -> None:
    patch = common_local_hit.PATCH
    verdict = judge(patch, versions_here()).outcome
    results: dict[str, Any] = {"verdict": verdict, "unpatched": look()}
    if verdict == "apply":
        patch.apply()
        patch.apply()
        results["patched"] = look()
        results["counted"] = effects.totals().get((patch.name, common_local_hit.BROUGHT_TOGETHER), 0)
        results["common"] = [is_common(NIXL), is_common(multi(NIXL, mock())), is_common(mock())]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
