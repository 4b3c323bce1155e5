"""A load of which one KV group failed: the request is computed anew as a whole, or fails, as the policy says."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.patches.scheduler import failed_group
from tests.upstream.run import ALL_VLLM_VERSIONS, IN_RELEASE, count, on

if IN_RELEASE:
    from tests.upstream.scheduler_lab import Lab

PROMPT, LOADED = 128, 112
ENDS = {
    "recompute": {"computed_anew": True, "tokens": [4, 12], "reason": "length", "all_blocks_free": True},
    "fail": {"computed_anew": False, "tokens": [0, 12], "reason": "error", "all_blocks_free": True},
}


@on(*ALL_VLLM_VERSIONS)
def test_failed_blocks_kill_the_engine_before_0_30_and_not_with_the_patch(version: str) -> None:
    """From 0.31 on a connector of a hybrid model has to name the request; Mooncake and lmcache 0.5.6 do."""
    if version < "0.30":
        for policy in ENDS:
            for group in (0, 1):
                with pytest.raises(ValueError, match=r"too many values to unpack \(expected 1\)"):
                    failed_load(policy, group)
        failed_group.PATCH.apply()
    for policy, end in ENDS.items():
        for group in (0, 1):
            if version < "0.31":
                assert failed_load(policy, group) == end, (policy, group)
            else:
                with pytest.raises(RuntimeError, match="failed_recving"):
                    failed_load(policy, group)
        if version >= "0.30":
            assert failed_load(policy, None) == end, policy
    assert count(failed_group.NAME, "whole-recomputations") == (4 if version < "0.30" else 0)


def failed_load(policy: str, group: int | None) -> dict[str, Any]:
    """`group`: whose blocks the worker reports; None: it reports the request (vLLM >= 0.30)."""
    lab = Lab(sliding_window=32, load_failure_policy=policy)
    free = lab.free_blocks
    lab.add("other", 40, max_tokens=12)
    lab.add("a", PROMPT, {"mock": {"matched": LOADED}})
    lab.step()
    assert lab.status("a") == "WAITING_FOR_REMOTE_KVS"
    null = lab.pool.null_block.block_id
    # A worker lists what it was told to fill: in a sliding window's group the null block too.
    report = {"failed_recving": {"a"}} if group is None else {"invalid_block_ids": {*lab.blocks("a", group)[-2:], null}}
    lab.book.failed.add("a")
    lab.step(finished_recving={"a"}, **report)
    scheduled = sum(lab.step().num_scheduled_tokens.get("a", 0) for _ in range(40))
    return {
        "computed_anew": scheduled >= PROMPT,
        "tokens": [len(lab.outputs.get(name, [])) for name in ("a", "other")],
        "reason": lab.finish_reasons.get("a"),
        "all_blocks_free": lab.free_blocks == free,
    }
