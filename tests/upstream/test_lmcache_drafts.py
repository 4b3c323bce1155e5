"""A block for drafts that vLLM moves is in one place for LMCache too (lmcache#4984), without a patch."""

from __future__ import annotations

from tests.upstream.run import IN_RELEASE, INSTALLED_VLLM, on

if IN_RELEASE:
    from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPRequestTracker

    from tests.upstream.scheduler_lab import Lab

BLOCK, DRAFTS, STATE = 16, 2, 1


@on(INSTALLED_VLLM)
def test_a_moved_block_is_in_one_place() -> None:
    """When LMCache is told what vLLM tells any connector, with as many slots to look back at as there are drafts. What
    is in two places is taken for the state of the first one, which no kernel has written: lmcache 0.5.5."""
    for step in (BLOCK, 3 * BLOCK, 5 * BLOCK):
        lab = Lab(num_blocks=400, max_num_batched_tokens=step, recurrent_state=True, drafts=DRAFTS)
        tracker = LMCacheMPRequestTracker(lab.add("a", BLOCK * 9 + 5, max_tokens=2))
        while lab.get("a") is not None:
            output = lab.schedule()
            told = [new.block_ids for new in output.scheduled_new_reqs]
            for blocks in (*told, *output.scheduled_cached_reqs.new_block_ids):
                tracker.append_block_ids(blocks or (), DRAFTS)
            believed = [block for block in tracker.allocated_block_ids[STATE] if block]
            assert len(believed) == len(set(believed)), step
            lab.update(output)
