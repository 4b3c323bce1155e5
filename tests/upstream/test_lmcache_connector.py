"""LMCache's connector in an engine: it stores what is computed, reports what has ended, and moves no block unseen.

On the real Scheduler and connector. Blocks have contents: a store of a token that is not computed is an error.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from pdserve.patches.lmcache import computed_count, lost_send
from tests.upstream.run import IN_RELEASE, INSTALLED_VLLM, VLLM_VERSIONS, count, on

if IN_RELEASE:
    from lmcache.integration.vllm.vllm_multi_process_adapter import LMCacheMPWorkerAdapter

    from tests.upstream.lmcache_engine import OURS, THEIRS, Engine, leaf, workloads


WORKLOADS = 60
PROMPT = list(range(1000, 1600))
BATCH = 125
"""Tokens of a step: no multiple of a block, so that steps end inside one."""
STORED, LOCAL = 256, 80
"""Tokens of the prompt that LMCache has, and vLLM itself: the load begins in the chunk where the local prefix ends."""


def engine() -> Any:
    made = Engine(leaf(THEIRS), batch=BATCH)
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


def random_workloads() -> list[str]:
    """Return what is wrong of them."""
    how = {"bounded": False, "failing": 0.3, "batches": (64, 125, 256)}
    return list(workloads(WORKLOADS, OURS, **how)["wrong"])


@on(*VLLM_VERSIONS)
def test_after_a_failed_load_upstream_stores_a_chunk_whose_last_block_is_computed_in_part() -> None:
    with pytest.raises(AssertionError, match=r"^stores at "):
        failed_behind_a_local_prefix().run()
    assert any("stores at" in wrong for wrong in random_workloads())
    computed_count.apply()
    computed_count.apply()
    made = failed_behind_a_local_prefix()
    assert (made.run(), made.ledger.locked) == (True, 0)
    assert made.stored >= len(PROMPT) // 64 * 64 - STORED, "what is computed is stored all the same"
    # It wants its whole prompt computed (as for logprobs of it), and vLLM drops LMCache's answer.
    made = engine()
    made.lab.add("a", PROMPT, max_tokens=2, skip_reading_prefix_cache=True)
    made.run()
    assert random_workloads() == []
    assert count(computed_count.NAME, "counts-lowered") > 0


class Transfer:
    """One that does not end."""

    def query(self) -> bool:
        return False


@on(INSTALLED_VLLM)
def test_a_lost_server_ends_saves_and_loads_each_reported_once() -> None:
    loads = ["both", "load"]
    assert polls() == [[[], []], [["save"], loads], [[], []]], "the save of `both` is never reported"
    lost_send.apply()
    assert polls() == [[[], []], [["both", "save"], loads], [[], []]]


def polls() -> list[list[list[str]]]:
    """(sends, loads) of three polls: when `both` and `save` have finished, when the server is lost, and later. Of the
    adapter without its connection: what it needs to poll its transfers."""
    adapter: Any = object.__new__(LMCacheMPWorkerAdapter)
    adapter.__dict__ |= {
        "dispatcher": None,
        "_health_event": threading.Event(),
        "store_futures": {"both": Transfer(), "save": Transfer()},
        "retrieve_futures": {"both": (Transfer(), [1, 2]), "load": (Transfer(), [3])},
        **{name: {} for name in ("store_events", "retrieve_events", "_pending_store_kv_events")},
        **{name: set() for name in ("error_block_ids", "_failed_request_ids", "_dropped_retrieves", "finished_stores")},
        **{name: set() for name in ("previously_finished", "_returned_finished")},
    }
    adapter._health_event.set()
    first = adapter.get_finished({"both", "save"})
    adapter._health_event.clear()
    answers = [first, adapter.get_finished(set()), adapter.get_finished({"both", "save"})]
    return [[sorted(sends or ()), sorted(loads or ())] for sends, loads in answers]
