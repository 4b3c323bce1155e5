"""LMCache as a child of MultiConnector: its lookups' locks, its blocks, and requests whose load failed elsewhere.

The real scheduler role of LMCacheMPConnector in the real Scheduler; a strict lock book stands in for the server, and
every block has contents.
"""

from __future__ import annotations

from typing import Any
from unittest import mock as unittest_mock

from pdserve.connectors.selection_lookups import LookupKeeper
from tests.upstream.run import IN_RELEASE, VLLM_VERSIONS, all_hold, on

if IN_RELEASE:
    from tests.upstream import lmcache_engine
    from tests.upstream.lmcache_engine import OURS, THEIRS, LedgerAdapter
    from tests.upstream.scheduler_lab import mock, multi

    EACH_OF_OURS = ((True, THEIRS), (True, OURS))
    """Our MultiConnector over LMCache's own class, and over ours."""

PROMPT = list(range(1000, 1512))
NEVER = 10**6


def engine(ours: bool, child: str, **how: Any) -> Any:
    """Over a mock and LMCache. `child`: where vLLM finds LMCache's class."""
    LedgerAdapter.slow, LedgerAdapter.strict = 0, True
    config = multi(mock(), lmcache_engine.leaf(child))
    if ours:
        config["kv_connector_module_path"] = "pdserve.connectors.multi"
    made = lmcache_engine.Engine(config, **{"batch": 128, **how})
    made.ledger.store(PROMPT, 0, len(PROMPT))
    return made


def overtaken(ours: bool, child: str) -> Any:
    """The mock has the prompt, LMCache's lookup takes five polls. Steps until the load begins, and what is left."""
    made = engine(ours, child)
    LedgerAdapter.slow = 5
    made.lab.add("r", PROMPT, {"mock": {"matched": len(PROMPT)}})
    while made.steps < 20 and not (made.mock.book.loads or made.loads):
        made.step()
    steps = made.steps
    assert made.run()
    assert [load.tokens for load in made.mock.book.loads] == [512]
    return steps, made.ledger.locked, made.loads, made.stored, made.ledger.sessions_ended


def a_load_begins_without_waiting_for_a_lookup_and_its_locks_are_given_back() -> None:
    """Overtaking alone would leave every chunk locked."""
    assert overtaken(False, THEIRS)[:2] == (6, 0)
    for which in EACH_OF_OURS:
        assert overtaken(*which) == (1, 0, [], 0, 1)
    with unittest_mock.patch.object(LookupKeeper, "settle", lambda self: self._unwanted.clear()):
        assert overtaken(True, THEIRS)[1] == 8


def a_request_that_ends_before_it_has_blocks_leaves_no_locks() -> None:
    """With the lookup unanswered, and with it answered."""
    for which, locked in (((False, THEIRS), 4), *((which, 0) for which in EACH_OF_OURS)):
        for slow in (5, 0):
            made = engine(*which, num_blocks=20)
            made.lab.add("big", 256, max_tokens=8)
            made.step()
            LedgerAdapter.slow = slow
            made.lab.add("r", PROMPT[:256])
            made.step()
            made.abort("r")
            made.run()
            assert made.ledger.locked == locked, (which, slow)


def an_overtaken_lookup_is_the_requests_own_again_after_a_preemption() -> None:
    for which in EACH_OF_OURS:
        made = engine(*which, num_blocks=40, batch=512)
        made.lab.add("other", 200, {}, max_tokens=120)
        made.step()
        LedgerAdapter.slow = NEVER
        request = made.lab.add("r", PROMPT[:256], {"mock": {"matched": 256}}, max_tokens=120)
        while not request.num_preemptions:
            assert made.lab.get("r") is not None
            made.step()
        asked = made.connector.scheduler_adapter.asked
        asked.update({name: (hit, 0) for name, (hit, _) in asked.items()})
        LedgerAdapter.slow = 0
        assert made.run(800)
        assert made.ledger.locked == 0


def a_child_that_does_not_load_stores_the_blocks_of_the_requests_own_tokens() -> None:
    """Before vLLM 0.26 it was given none, and stored those of other tokens (vllm#46865): plan/versions.py refuses."""
    for which in ((False, THEIRS), *EACH_OF_OURS):
        made = engine(*which)
        made.ledger.chunks.clear()
        made.lab.add("r", [*PROMPT, 7])
        assert (made.run(), made.stored) == (True, 512)


def a_request_whose_load_failed_elsewhere_waits_for_no_hit_that_lmcache_never_loads() -> None:
    """Of which it had nothing when it was asked first. And no more locks are left than the request's own load gives
    back."""
    stuck, done = (False, "WAITING_FOR_REMOTE_KVS", 8), (True, "GONE", 0)
    for which, end in (((False, THEIRS), stuck), *((which, done) for which in EACH_OF_OURS)):
        made = engine(*which)
        made.ledger.chunks.clear()
        made.lab.add("r", [*PROMPT, 7], {"mock": {"matched": 256}})
        made.step()
        made.ledger.store(PROMPT, 0, len(PROMPT))
        made.mock.book.failed.add("r")
        made.arriving.clear()
        made.lab.step(finished_recving={"r"}, invalid_block_ids=made.lab.blocks("r"))
        assert (made.run(100), made.lab.status("r"), made.ledger.locked) == end, which


@on(*VLLM_VERSIONS)
def test_below_our_multiconnector_lmcache_keeps_no_lock_and_loads_what_it_has_found() -> None:
    all_hold(
        a_load_begins_without_waiting_for_a_lookup_and_its_locks_are_given_back,
        a_request_that_ends_before_it_has_blocks_leaves_no_locks,
        an_overtaken_lookup_is_the_requests_own_again_after_a_preemption,
        a_child_that_does_not_load_stores_the_blocks_of_the_requests_own_tokens,
        a_request_whose_load_failed_elsewhere_waits_for_no_hit_that_lmcache_never_loads,
    )
