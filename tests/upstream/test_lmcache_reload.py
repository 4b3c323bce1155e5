"""How much of a prompt one reload takes (max_tokens_per_load, min_load_tokens), on the real Scheduler and connector;
and that no read lock of it stays behind, with such bounds or without.

A ledger stands in for the LMCache server: it raises when a read lock is given back that nobody holds. Blocks have
contents: a step that would attend to, or store, what is not computed or loaded is an error too.
"""

from __future__ import annotations

from typing import Any

from pdserve.patches import effects
from tests.upstream.run import IN_RELEASE, VLLM_VERSIONS, on

if IN_RELEASE:
    from tests.upstream.lmcache_engine import CAP, CHUNK, LEAST, OURS, THEIRS, Engine, LedgerAdapter, leaf, workloads
    from tests.upstream.scheduler_lab import multi

WORKLOADS = 25
PROMPT = list(range(1000, 2800))
STORED = 1792
"""Of them, in whole chunks."""


def engine(module: str, *, stored: int = STORED, num_blocks: int = 400, child: bool = False, **extra: Any) -> Any:
    """`child`: it is the only one of our MultiConnector, which looks after lookups too."""
    config = leaf(module, **extra)
    if child:
        config = multi(config) | {"kv_connector_module_path": "pdserve.connectors.multi"}
    made = Engine(config, num_blocks=num_blocks)
    made.ledger.store(PROMPT, 0, stored)
    return made


def reload(made: Any) -> Any:
    """Tokens of its loads, and how many were computed and stored."""
    before = made.computed
    made.add("a", PROMPT)
    assert made.run()
    assert (made.ledger.locked, made.connector.request_trackers) == (0, {})
    return [load[1:] for load in made.loads], made.computed - before, made.stored


def inside_a_chunk(made: Any) -> Any:
    """vLLM has 48 tokens of the prompt itself; chunks have 64."""
    made.add("warm", [*PROMPT[:48], *range(9000, 9010)])
    assert made.run()
    return reload(made)


def without_blocks(made: Any, slow: int = 0) -> None:
    """Another request holds them for many steps, in each of which vLLM asks again."""
    LedgerAdapter.slow = slow
    made.add("other", list(range(5000, 5900)), max_tokens=24)
    made.step()
    made.step()
    LedgerAdapter.polls.clear()


def locks_after_an_abort(slow: int, module: str, **how: Any) -> int:
    """Of a request that ends before it has blocks: every chunk of the hit is locked then."""
    made = engine(module, num_blocks=130, **how)
    without_blocks(made, slow)
    made.add("a", PROMPT)
    made.step()
    assert made.ledger.locked == 28
    made.abort("a")
    LedgerAdapter.slow = 0
    assert made.run()
    assert (made.lab.free_blocks, len(made.connector.request_trackers)) == (129, 0), "no block is lost"
    return int(made.ledger.locked)


@on(*VLLM_VERSIONS)
def test_a_reload_takes_whole_chunks_up_to_the_cap_and_none_below_the_minimum() -> None:
    """Upstream has neither. What is computed is stored like any new token, and a local prefix that ends inside a chunk
    is neither loaded again nor counted as loaded. Without bounds ours is upstream's."""
    cap: dict[str, Any] = {CAP: 512}
    least: dict[str, Any] = {LEAST: 128}
    all_of_it = len(PROMPT) + 1 - STORED
    for module in (THEIRS, OURS):
        assert reload(engine(module)) == ([(0, STORED)], all_of_it, 0)
        assert inside_a_chunk(engine(module))[0] == [(48, STORED)]
        assert reload(engine(module, stored=CHUNK))[0] == [(0, CHUNK)]
    effects.forget()
    for child in (False, True):
        assert reload(engine(OURS, child=child, **cap)) == ([(0, 512)], all_of_it + STORED - 512, STORED - 512)
        loads, computed, _ = reload(engine(OURS, stored=CHUNK, child=child, **least))
        assert (loads, computed) == ([], len(PROMPT) + 1)
    assert inside_a_chunk(engine(OURS, **cap))[0] == [(48, 512)], "at most 512, and up to a boundary of chunks"
    assert reload(engine(OURS, stored=2 * CHUNK, **least))[0] == [(0, 128)], "the minimum itself is loaded"
    made = engine(OURS, num_blocks=130, **cap)
    without_blocks(made)
    loads, _, stored = reload(made)
    assert (loads, stored) == ([(0, 512)], 896 + STORED - 512), "896 tokens are the other request's"
    assert LedgerAdapter.polls["a"] > 10, "asking in every step releases each lock once"
    counted = {f"{patch} {effect}": value for (patch, effect), value in effects.totals().items()}
    assert counted["lmcache-load-cap loads-capped"] == 4
    assert counted["lmcache-load-cap tokens-left-to-recompute"] == 4 * (STORED - 512)
    assert counted["lmcache-min-load loads-skipped"] == 2
    assert counted["lmcache-min-load tokens-left-to-recompute"] == 2 * CHUNK
    assert (counted["lmcache-load-cap instances"], counted["lmcache-min-load instances"]) == (4, 3)


@on(*VLLM_VERSIONS)
def test_a_request_that_ends_before_it_has_blocks_leaves_its_locks_with_upstreams_class_and_none_with_ours() -> None:
    """vllm#44100: an engine with LMCache alone, until the read TTL. Below our MultiConnector upstream's leaves none
    either."""
    for slow in (0, 3):
        assert locks_after_an_abort(slow, THEIRS) == 28
        assert locks_after_an_abort(slow, OURS) == locks_after_an_abort(slow, OURS, **{CAP: 512}) == 0
    assert effects.totals()["lmcache-lookup-locks", "lookups-released"] == 4, "two with bounds, two without"
    for slow in (0, 3):
        assert locks_after_an_abort(slow, OURS, child=True, **{CAP: 512}) == 0
    assert any("locks left" in wrong for wrong in workloads(WORKLOADS, THEIRS, bounded=False)["wrong"])
    assert workloads(WORKLOADS, OURS, bounded=False)["wrong"] == []


@on(*VLLM_VERSIONS)
def test_random_workloads_on_too_few_blocks_leave_no_lock_and_never_read_or_store_what_is_not_there() -> None:
    """Nor is there a deadlock: vllm#44560."""
    seen = workloads(WORKLOADS)
    assert (seen["wrong"], seen["verdicts"]) == ([], {"done": WORKLOADS})
    assert seen["loads"] > 2 * WORKLOADS
    assert seen["preempted"] > 0
    totals = effects.totals()
    assert totals["lmcache-load-cap", "loads-capped"] > WORKLOADS
    assert totals["lmcache-min-load", "loads-skipped"] > 5
