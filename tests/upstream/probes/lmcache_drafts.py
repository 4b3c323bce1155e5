"""LMCache's list of a request's blocks beside vLLM's own, of a model with recurrent state and drafts."""

from __future__ import annotations

import inspect
import json
from typing import Any

from tests.upstream.probes.lmcache_native import borrow

borrow()

from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPRequestTracker  # noqa: E402

from tests.upstream.scheduler_lab import Lab  # noqa: E402

BLOCK, DRAFTS, STATE = 16, 2, 1


def follow(prompt: int, step: int) -> dict[str, Any]:
    """What LMCache believes after a prefill in steps of that size, when it is told what vLLM tells any connector."""
    lab = Lab(num_blocks=400, block_size=BLOCK, max_num_batched_tokens=step, recurrent_state=True, drafts=DRAFTS)
    tracker = LMCacheMPRequestTracker(lab.add("a", prompt, max_tokens=2))
    # The connector gives it as many slots as there are drafts, where it takes that.
    window = [DRAFTS] if "relocation_window" in inspect.signature(tracker.append_block_ids).parameters else []
    twice = 0
    while lab.get("a") is not None:
        output = lab.schedule()
        for new in output.scheduled_new_reqs:
            tracker.append_block_ids(new.block_ids, *window)
        for blocks in output.scheduled_cached_reqs.new_block_ids:
            tracker.append_block_ids(blocks or (), *window)
        believed = [block for block in tracker.allocated_block_ids[STATE] if block]
        twice = max(twice, len(believed) - len(set(believed)))
        lab.update(output)
    return {"blocks_in_two_places": twice}


def main() -> None:
    print(json.dumps([follow(BLOCK * 9 + 5, step) for step in (BLOCK, 3 * BLOCK, 5 * BLOCK)]))


if __name__ == "__main__":
    main()
