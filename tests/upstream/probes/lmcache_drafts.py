"""LMCache's list of a request's blocks beside vLLM's own, of a model with recurrent state and drafts."""

from __future__ import annotations

import json
from typing import Any

from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPRequestTracker

from tests.upstream.scheduler_lab import Lab

BLOCK, DRAFTS, STATE = 16, 2, 1


def follow(prompt: int, step: int) -> dict[str, Any]:
    """What LMCache believes after a prefill in steps of that size, when it is told what vLLM tells any connector.
    The connector gives it as many slots to look back at as there are drafts."""
    lab = Lab(num_blocks=400, block_size=BLOCK, max_num_batched_tokens=step, recurrent_state=True, drafts=DRAFTS)
    tracker = LMCacheMPRequestTracker(lab.add("a", prompt, max_tokens=2))
    twice = 0
    while lab.get("a") is not None:
        output = lab.schedule()
        for new in output.scheduled_new_reqs:
            tracker.append_block_ids(new.block_ids, DRAFTS)
        for blocks in output.scheduled_cached_reqs.new_block_ids:
            tracker.append_block_ids(blocks or (), DRAFTS)
        believed = [block for block in tracker.allocated_block_ids[STATE] if block]
        twice = max(twice, len(believed) - len(set(believed)))
        lab.update(output)
    return {"blocks_in_two_places": twice}


def main() -> None:
    print(json.dumps([follow(BLOCK * 9 + 5, step) for step in (BLOCK, 3 * BLOCK, 5 * BLOCK)]))


if __name__ == "__main__":
    main()
