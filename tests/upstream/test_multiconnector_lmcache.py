"""LMCache as a child of MultiConnector: its lookups' locks, its blocks, and requests whose load failed elsewhere.

The real scheduler role of LMCacheMPConnector in the real Scheduler; a strict lock book stands in for the server, and
every block has contents. Against a real server: the last test.
"""

from __future__ import annotations

from typing import Any
from unittest import mock as unittest_mock

import pytest

from pdserve.connectors.selection_lookups import LookupKeeper
from pdserve.patches import effects
from tests.upstream.run import IN_RELEASE, INSTALLED_VLLM, VLLM_VERSIONS, all_hold, on

if IN_RELEASE:
    from tests.upstream import lmcache_engine, lmcache_server
    from tests.upstream.lmcache_engine import OURS, THEIRS, LedgerAdapter
    from tests.upstream.scheduler_lab import mock, multi

PROMPT = list(range(1000, 1512))
NEVER = 10**6


def engine(ours: bool, child: str, *, weight: float = 1, **how: Any) -> Any:
    """Over a mock and LMCache. `child`: where vLLM finds LMCache's class."""
    LedgerAdapter.slow, LedgerAdapter.strict = 0, True
    config = multi(mock(), lmcache_engine.leaf(child, load_weight=weight))
    if ours:
        config["kv_connector_module_path"] = "pdserve.connectors.multi"
    made = lmcache_engine.Engine(config, **{"batch": 128, **how})
    made.ledger.store(PROMPT, 0, len(PROMPT))
    return made


def each_of_ours() -> list[tuple[bool, str]]:
    """Our MultiConnector over LMCache's own class, and over ours."""
    return [(True, THEIRS), (True, OURS)]


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
    for which in each_of_ours():
        assert overtaken(*which) == (1, 0, [], 0, 1)
    with unittest_mock.patch.object(LookupKeeper, "settle", lambda self: self._unwanted.clear()):
        assert overtaken(True, THEIRS)[1] == 8


def lmcache_is_waited_for_when_it_has_more_weight() -> None:
    for which in each_of_ours():
        made = engine(*which, weight=2)
        LedgerAdapter.slow = 5
        made.lab.add("r", [*PROMPT, 7], {"mock": {"matched": 256}})
        assert made.run()
        assert (made.loads, made.mock.book.loads, made.ledger.locked) == ([("r", 0, 512)], [], 0)


def a_request_that_ends_before_it_has_blocks_leaves_no_locks() -> None:
    """With the lookup unanswered, and with it answered."""
    for which, locked in (((False, THEIRS), 4), *((which, 0) for which in each_of_ours())):
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
    for which in each_of_ours():
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
    for which in ((False, THEIRS), *each_of_ours()):
        made = engine(*which)
        made.ledger.chunks.clear()
        made.lab.add("r", [*PROMPT, 7])
        assert (made.run(), made.stored) == (True, 512)


def a_request_whose_load_failed_elsewhere_waits_for_no_hit_that_lmcache_never_loads() -> None:
    """Of which it had nothing when it was asked first. And no more locks are left than the request's own load gives
    back."""
    stuck, done = (False, "WAITING_FOR_REMOTE_KVS", 8), (True, "GONE", 0)
    for which, end in (((False, THEIRS), stuck), *((which, done) for which in each_of_ours())):
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
        lmcache_is_waited_for_when_it_has_more_weight,
        a_request_that_ends_before_it_has_blocks_leaves_no_locks,
        an_overtaken_lookup_is_the_requests_own_again_after_a_preemption,
        a_child_that_does_not_load_stores_the_blocks_of_the_requests_own_tokens,
        a_request_whose_load_failed_elsewhere_waits_for_no_hit_that_lmcache_never_loads,
    )


@pytest.mark.full  # whether the server answers before it is stopped is a matter of the machine's load
@on(INSTALLED_VLLM)
def test_no_read_lock_is_left_on_a_real_server() -> None:
    """Four chunks a prompt. Without the keeper they stay locked; after an abort with upstream the job stays too."""
    with lmcache_server.server() as at:
        ours = real_engine(at, "pdserve.connectors.multi")
        for number in range(1, 6):
            ours.lab.add(f"seed-{number}", [*prompt(number), 1], max_tokens=1)
        ours.run()
        at.until(lambda status: status["objects"] >= 20 and not status["sessions"])
        clean = {"objects": 20, "locked": 0, "jobs": 0, "sessions": 0}
        ours.lab.add("loaded", [*prompt(1), 1])
        ours.run()
        assert (ours.connector.request_trackers, ours.loaded) == ({}, 256)
        assert at.until(lambda status: not status["sessions"]) == clean
        assert real_overtaken(ours, at, 2) == clean
        assert real_aborted(ours, at, 3) == clean
        counted = {name: value for (_, name), value in effects.totals().items()}
        # On a busy machine a request can end before the answer to its lookup is here: the end of its session releases.
        assert counted.pop("lookups-released") in (1, 2)
        assert counted == {"instances": 1, "pending-lookups-overtaken": 1}
        with unittest_mock.patch.object(LookupKeeper, "settle", lambda self: self._unwanted.clear()):
            without = real_overtaken(ours, at, 4)
        ours.close(0)
        # There too the request may have taken the answer: then its job is gone, and the locks stay.
        assert (without["locked"], without["jobs"] in (0, 1)) == (4, True)
        upstream = real_engine(at, "")
        left = real_aborted(upstream, at, 5)
        upstream.close(0)
        assert (left["locked"], left["jobs"] - without["jobs"]) == (8, 1)


def real_engine(at: Any, module: str) -> Any:
    """`module`: of MultiConnector's class, upstream's own if empty."""
    config = multi(mock(), lmcache_server.leaf(at, THEIRS))
    if module:
        config["kv_connector_module_path"] = module
    return lmcache_server.Engine(at, config, mark=1, num_blocks=128, prefix_caching=False)


def prompt(number: int) -> list[int]:
    return list(range(number * 1000, number * 1000 + 256))


def real_overtaken(made: Any, at: Any, number: int) -> dict[str, int]:
    """The mock has everything: LMCache, which has not answered yet, is not waited for."""
    locked = at.figures()["locked"]
    made.lab.add(f"r-{number}", [*prompt(number), 1], {"mock": {"matched": 256}}, max_tokens=3)
    with at.silent():
        made.step()
    assert made.lab.status(f"r-{number}") == "WAITING_FOR_REMOTE_KVS"
    at.until(lambda status: status["locked"] >= locked + 4)
    made.run()
    return dict(at.until(lambda status: not status["sessions"]))


def real_aborted(made: Any, at: Any, number: int) -> dict[str, int]:
    """The client goes when the lookup has been sent and nobody has asked for its answer."""
    locked = at.figures()["locked"]
    made.lab.add(f"r-{number}", [*prompt(number), 1])
    with at.silent():
        made.step()
    assert made.lab.status(f"r-{number}") == "WAITING"
    at.until(lambda status: status["locked"] >= locked + 4)
    made.lab.abort(f"r-{number}")
    made.run()
    return dict(at.until(lambda status: not status["sessions"]))
