"""LMCache stores what is computed, also where vLLM has computed less of a request than LMCache's lookup has found.

On the real Scheduler and connector. Blocks have contents: a store of a token that is not computed is an error.
"""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.patches.lmcache import computed_count
from tests.upstream.run import IN_RELEASE, VLLM_VERSIONS, count, on

if IN_RELEASE:
    from tests.upstream.lmcache_engine import OURS, THEIRS, Engine, leaf
    from tests.upstream.lmcache_workload import workloads

WORKLOADS = 60
PROMPT = list(range(1000, 1600))
BATCH = 125
"""Tokens of a step: no multiple of a block, so that steps end inside one."""
STORED, LOCAL = 256, 80
"""Tokens of the prompt that LMCache has, and vLLM itself: the load begins in the chunk where the local prefix ends."""


def engine(**scheduler: Any) -> Any:
    made = Engine(leaf(THEIRS), batch=BATCH, scheduler=scheduler)
    made.ledger.store(PROMPT, 0, STORED)
    return made


def failed_behind_a_local_prefix() -> Any:
    """vLLM goes on where the first block of the load is, without asking again."""
    made = engine()
    made.add("warm", [*PROMPT[:LOCAL], 1, 2, 3])
    assert made.run()
    made.fails = {"a"}.__contains__
    made.add("a", PROMPT)
    return made


def failed_with_a_running_neighbour() -> Any:
    """The failed load names a block that a running prefill shares with it: vLLM sets that one back."""
    made = engine(long_prefill_token_threshold=50)
    made.add("neighbour", [*PROMPT[:LOCAL], *range(7000, 7520)])
    while made.lab.get("neighbour").num_computed_tokens < 2 * LOCAL:
        made.step()
    made.fails = {"a"}.__contains__
    made.add("a", PROMPT)
    return made


def random_workloads() -> list[str]:
    """What is wrong of them."""
    how = {"bounded": False, "failing": 0.3, "batches": (64, 125, 256)}
    return list(workloads(WORKLOADS, OURS, **how)["wrong"])


@on(*VLLM_VERSIONS)
def test_after_a_failed_load_upstream_stores_a_chunk_whose_last_block_is_computed_in_part() -> None:
    cases = (failed_behind_a_local_prefix, failed_with_a_running_neighbour)
    for case in cases:
        with pytest.raises(AssertionError, match=r"^stores at "):
            case().run()
    assert any("stores at" in wrong for wrong in random_workloads())
    computed_count.apply()
    computed_count.apply()
    for case in cases:
        made = case()
        assert (made.run(), made.ledger.locked) == (True, 0)
        assert made.stored >= len(PROMPT) // 64 * 64 - STORED, "what is computed is stored all the same"
    # It wants its whole prompt computed (as for logprobs of it), and vLLM drops LMCache's answer.
    made = engine()
    made.lab.add("a", PROMPT, max_tokens=2, skip_reading_prefix_cache=True)
    made.run()
    assert random_workloads() == []
    assert count(computed_count.NAME, "counts-lowered") > 0
