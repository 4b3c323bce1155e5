"""KV events: their bytes, their numbers, and the index of what engines hold."""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.pd.routing.ask import RoutingRequest
from pdserve.pd.routing.build import make
from pdserve.pd.routing.kv_index import KvIndex
from pdserve.pd.routing.kv_sources import Source, sources_from, sources_of
from pdserve.pd.routing.kv_subscriber import Feed, Step
from pdserve.pd.routing.kv_wire import (
    AllBlocksCleared,
    BadEventsError,
    BlockRemoved,
    BlockStored,
    Event,
    decode,
)
from pdserve.pd.routing.policies import KvEvents
from tests.proxy.candidates import Worker, everywhere, workers
from tests.tables import each_row

BLOCK = 2


def ask(*tokens: int) -> RoutingRequest:
    return RoutingRequest(prompt=b"any text", tokens=tokens, estimate=len(tokens))


def engine_hash(tokens: tuple[int, ...]) -> bytes:
    """Return what an engine might call the block that ends this prefix."""
    return b"hash of " + bytes(tokens)


def stored(tokens: tuple[int, ...], begin: int = 0, block: int = BLOCK, **fields: Any) -> BlockStored:
    """All whole blocks of `tokens` but the first `begin`."""
    end = len(tokens) // block * block
    usual = {
        "block_hashes": [engine_hash(tokens[: stop + block]) for stop in range(begin * block, end, block)],
        "parent_block_hash": engine_hash(tokens[: begin * block]) if begin else None,
        "token_ids": list(tokens[begin * block : end]),
        "block_size": block,
        "medium": "GPU",
        "group_idx": 0,
    }
    return BlockStored(**usual | fields)


def removed(*prefixes: tuple[int, ...], medium: str = "GPU", group: int = 0) -> BlockRemoved:
    return BlockRemoved([engine_hash(prefix) for prefix in prefixes], medium, group)


TWO, FOUR, SIX = (1, 2), (1, 2, 3, 4), (1, 2, 3, 4, 5, 6)


@each_row(
    "events, held",
    [
        ([stored(TWO), stored(FOUR, begin=1)], 4),
        ([stored(TWO), stored((9, 9, 3, 4), begin=1)], 2),  # an unknown parent
        ([stored(FOUR, begin=1), stored(TWO)], 2),  # known too late
        # Of two copies of a block one is evicted, which vLLM reports like the eviction of both.
        ([stored(TWO), removed(TWO), stored(FOUR, begin=1), stored(TWO)], 4),
        # The size of a block is the event's.
        ([stored(FOUR, block=4)], 4),
        # Hashes are bytes or integers.
        ([BlockStored([7], None, [1, 2], 2), BlockStored([2**64 - 1], 7, [3, 4], 2)], 4),
        ([BlockStored([7], None, [1, 2], 2), BlockStored([2**64 - 1], 7, [3, 4], 2), BlockRemoved([2**64 - 1])], 2),
        # Blocks before an image have names.
        ([stored(SIX, extra_keys=[None, [["image", 0]], None])], 2),
        # Only the GPU counts.
        ([stored(TWO), stored(FOUR, medium="CPU"), removed(TWO, medium="STORAGE")], 2),
        # Of several groups the one that holds least decides.
        ([stored(SIX), stored(FOUR, group_idx=1)], 4),
        ([stored(SIX), stored(FOUR, group_idx=1), removed(FOUR, group=1)], 2),
        ([stored(SIX), stored(FOUR, block=4, group_idx=1)], 4),
        # Those that need no whole prefix do not count.
        ([stored(FOUR), stored(TWO, group_idx=1, kv_cache_spec_kind="sliding_window")], 4),
        ([stored(FOUR), stored(TWO, group_idx=1, kv_cache_spec_kind="mamba")], 4),
        ([stored(FOUR), stored(TWO, group_idx=1, kv_cache_spec_kind="chunked_local_attention")], 4),
    ],
)
def test_what_a_worker_holds_of_a_prompt(events: list[Event], held: int) -> None:
    index = KvIndex(1000)
    index.apply("w", 0, events)
    assert index.matched("w", ask(1, 2, 3, 4, 5, 6, 7, 8))[0] == held


@each_row(
    "fields",
    [
        {"lora_name": "adapter"},
        {"lora_id": 1},
        {"extra_keys": [["salt"], None, None]},
        {"extra_keys": [[["image", 0]], [["image", -2]], None]},
        {"extra_keys": [None]},
        {"token_ids": [1, 2, 3, 4, 5, 6, 7, 8]},
        {"token_ids": []},
        {"token_ids": [], "block_size": 0},
        {"lookahead_token_ids": [[9], [9], [9]]},
        {"token_ids": [-1, 2, 3, 4, 5, 6]},
    ],
)
def test_what_token_ids_do_not_name_never_matches(fields: dict[str, Any]) -> None:
    index = KvIndex(1000)
    index.apply("w", 0, [stored(SIX, **fields), stored((1, 2, 3, 4, 5, 6, 7, 8), begin=3)])
    assert index.matched("w", ask(1, 2, 3, 4, 5, 6, 7, 8)) == {0: 0}
    assert index.counts["unnamed"] == 4, "its successor has no name either"
    index.apply("w", 0, [removed(TWO), stored(TWO)])
    assert index.matched("w", ask(*FOUR)) == {0: 2}, "the same ids without the rest do"


def test_ranks_and_workers_are_apart() -> None:
    index = KvIndex(1000)
    index.apply("a", 0, [stored((1, 2))])
    index.apply("a", 1, [stored((1, 2, 3, 4))])
    index.apply("b", 0, [stored((5, 6))])
    assert index.matched("a", ask(1, 2, 3, 4)) == {0: 2, 1: 4}
    index.forget("a", 1)
    assert index.matched("a", ask(1, 2, 3, 4)) == {0: 2}
    index.forget("a")
    assert index.matched("a", ask(1, 2, 3, 4)) == {}
    assert index.matched("b", ask(5, 6)) == {0: 2}


@each_row("tokens", [None, [-1, 2], [2**40, 1], ["x", "y"]])
def test_without_token_ids_nothing_matches(tokens: list[int] | None) -> None:
    index = KvIndex(1000)
    index.apply("w", 0, [stored((1, 2))])
    assert not any(index.matched("w", RoutingRequest(prompt=b"", tokens=tokens, estimate=2)).values())


class Cache:
    """An engine's cache, naively: the prefixes that it holds, and every prefix that it was ever told of."""

    def __init__(self) -> None:
        self.held: set[tuple[int, ...]] = set()

    def matched(self, tokens: tuple[int, ...]) -> int:
        blocks = 0
        while (end := (blocks + 1) * BLOCK) <= len(tokens) and tokens[:end] in self.held:
            blocks += 1
        return blocks * BLOCK


prompts = st.lists(st.integers(0, 2), max_size=12).map(tuple)
changes = st.one_of(
    st.tuples(st.just("store"), prompts, st.integers(0, 99)),
    st.tuples(st.just("remove"), st.integers(0, 99), st.integers(1, 3)),
    st.tuples(st.just("clear")),
    st.tuples(st.just("restart")),
)


@settings(max_examples=settings().max_examples * 3)
@given(
    history=st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 1), changes), max_size=40),
    asked=st.lists(prompts, min_size=1, max_size=8),
)
def test_it_equals_a_naive_model(
    history: list[tuple[str, int, tuple[object, ...]]], asked: list[tuple[int, ...]]
) -> None:
    """Engines store what they lack of a prompt, evict any block (also one whose successors they keep) and reset."""
    index = KvIndex(1000)
    caches: dict[tuple[str, int], Cache] = {}
    for worker, rank, change in history:
        cache = caches.setdefault((worker, rank), Cache())
        events: list[Event] = []
        match change:
            case ("store", tuple() as tokens, int()):
                begin = cache.matched(tokens) // BLOCK
                if (begin + 1) * BLOCK <= len(tokens):
                    events.append(stored(tokens, begin))
                    cache.held.update(tokens[:end] for end in range(BLOCK, len(tokens) + 1, BLOCK))
            case ("remove", int() as first, int() as count):
                victims = sorted(cache.held)[first : first + count]
                events.append(removed(*victims))
                cache.held.difference_update(victims)
            case ("clear",):
                events.append(AllBlocksCleared())
                cache.held.clear()
            case _:
                index.forget(worker)
                for (name, _), other in caches.items():
                    if name == worker:
                        other.held.clear()
        index.apply(worker, rank, events)
        for tokens in asked:
            for (name, number), known in caches.items():
                assert index.matched(name, ask(*tokens)).get(number, 0) == known.matched(tokens)
    for (name, _), _cache in caches.items():
        assert index.blocks(name) == sum(len(other.held) for (who, _), other in caches.items() if who == name)


@given(
    batches=st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=20).map(tuple), max_size=30),
    bound=st.integers(1, 12),
    sizes=st.lists(st.integers(1, 3), min_size=30, max_size=30),
)
def test_memory_is_bounded_and_what_is_left_is_true(
    batches: list[tuple[int, ...]], bound: int, sizes: list[int]
) -> None:
    index = KvIndex(bound)
    for tokens, size in zip(batches, sizes, strict=False):
        index.apply("w", 0, [stored(tokens, block=size)])
        assert index.blocks("w") <= bound
        others = ask(9, *tokens)
        assert index.matched("w", others) == {0: 0}
        assert index.matched("w", ask(*tokens))[0] <= len(tokens)


def kv_events() -> tuple[KvEvents, KvIndex]:
    policy = make(everywhere("kv_events"), "prefill", Random(1))
    assert isinstance(policy, KvEvents)
    return policy, policy.index


def test_the_policy_prefers_who_holds_most() -> None:
    policy, index = kv_events()
    pool = workers(3)
    index.apply("worker-1", 0, [stored((1, 2))])
    index.apply("worker-2", 0, [stored((1, 2, 3, 4))])
    choice = policy.choose(pool, ask(1, 2, 3, 4, 5))
    assert (choice.worker.name, choice.why) == ("worker-2", "match")
    assert policy.matched(pool[2], ask(1, 2, 3, 4, 5)) == 4
    pool[2].prompt_tokens = 4096 + 2 + 1 + 2
    assert policy.choose(pool, ask(1, 2, 3, 4, 5)).why == "overloaded"
    assert policy.choose(pool, ask(*range(10, 30))).why == "no_match"


def test_the_policy_never_compares_text() -> None:
    policy, index = kv_events()
    pool = workers(2)
    text = RoutingRequest(prompt=b"the same text" * 100, tokens=None, estimate=300)
    policy.routed(pool[0], text)
    index.apply("worker-0", 0, [stored((1, 2, 3, 4))])
    choices = [policy.choose(pool, text) for _ in range(4)]
    assert {choice.why for choice in choices} == {"no_tokens"}
    assert {choice.worker.name for choice in choices} == {"worker-0", "worker-1"}


def test_the_policy_knows_the_best_rank() -> None:
    policy, index = kv_events()
    index.apply("worker-0", 0, [stored((1, 2))])
    index.apply("worker-0", 3, [stored((1, 2, 3, 4))])
    worker = Worker("worker-0")
    assert policy.rank(worker, ask(1, 2, 3, 4)) == 3
    assert policy.rank(worker, ask(9, 9, 9)) is None
    policy.forget("worker-0")
    assert policy.rank(worker, ask(1, 2, 3, 4)) is None


# --- the numbers of batches: each is applied exactly once and in order, or what is known is forgotten


@each_row("first", [0, 1])
def test_an_engine_that_began_anew(first: int) -> None:
    feed = Feed()
    for number in range(3):
        feed.live(number)
    assert feed.live(first) is Step.RESTART
    assert feed.live(first) is (Step.APPLY if first == 0 else Step.GAP)


@given(lost=st.sets(st.integers(0, 30)), kept=st.integers(0, 31))
def test_nothing_is_applied_twice_or_after_something_that_is_missing(lost: set[int], kept: int) -> None:
    """A publisher of 31 batches whose replay has the last `kept` of those so far."""
    feed = Feed()
    known: list[int] = []
    for number in range(31):
        if number in lost:
            continue
        step = feed.live(number)
        if step is Step.GAP:
            for old in range(max(feed.expected, number + 1 - kept), number + 1):
                again = feed.replayed(old)
                if again is Step.GAP:
                    known.clear()
                    feed.jump(old, live=False)
                if again is not Step.SKIP:
                    known.append(old)
            step = feed.live(number)
        if step is Step.GAP:
            known.clear()
            feed.jump(number, live=True)
        if step in (Step.GAP, Step.APPLY):
            known.append(number)
        assert known == list(range(known[0], number + 1))


def test_sources_as_an_engine_reports_them() -> None:
    """The answer of GET /kv_event_sources."""
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "buffer_steps": 10_000, "topic": "kv"}
    answer = {
        "0": {**config, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://0.0.0.0:6557"},
        "1": {**config, "endpoint": "tcp://10.1.2.3:41234", "replay_endpoint": None},
        "2": {**config, "endpoint": "ipc:///tmp/events", "replay_endpoint": None},
    }
    assert sources_from(answer, "node-7") == (
        Source(0, "tcp://node-7:5557", "tcp://node-7:6557", "kv"),
        Source(1, "tcp://10.1.2.3:41234", None, "kv"),
        Source(2, "ipc:///tmp/events", None, "kv"),
    )
    assert sources_from({}, "node-7") == ()
    assert sources_from({"0": {"publisher": "null", "endpoint": "tcp://*:5557"}}, "node-7") == ()


def test_sources_as_the_engine_was_configured() -> None:
    assert sources_of("tcp://*:5557", "tcp://*:6557", "", "::1", ranks=2) == (
        Source(0, "tcp://[::1]:5557", "tcp://[::1]:6557"),
        Source(1, "tcp://[::1]:5558", "tcp://[::1]:6558"),
    )


@each_row(
    "answer",
    [
        [],
        {"0": "tcp://*:5557"},
        {"0": {"endpoint": None}},
        {"0": {"endpoint": "tcp://*:0"}},
        {"0": {"endpoint": "tcp://*"}},
        {"0": {"endpoint": "udp://*:5557"}},
        {"0": {"endpoint": "tcp://*:99999"}},
        {"zero": {"endpoint": "tcp://*:5557"}},
    ],
)
def test_an_answer_that_makes_no_sense(answer: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        sources_from(answer, "node-7")


# --- kV events as vLLM encodes them: recorded bytes of several versions, and the classes of the one that is installed


# Encoded with the classes in vllm/distributed/kv_events.py of each version: two blocks stored of which the second has
# a cache_salt, one removed, all cleared; by data parallel rank 3.
RECORDED = {
    "0.21.0": (
        "93cb3ff8000000000000939aab426c6f636b53746f72656492c4080101010101010101c4080202020202020202c0940b0c0d"
        "0e02c0a3475055c092c091a473616c740094ac426c6f636b52656d6f76656491c4080101010101010101a34750550091b041"
        "6c6c426c6f636b73436c656172656403"
    ),
    "0.33.0": (
        "93cb3ff800000000000093de000ea474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392c408010101"
        "0101010101c4080202020202020202b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473940b0c0d0eaa"
        "626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b"
        "65797392c091a473616c74a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474"
        "656e74696f6ea86c6f63616c697479a54c4f43414caa73657373696f6e5f6964a173b36c6f6f6b61686561645f746f6b656e"
        "5f69647391910184a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391c4080101010101010101"
        "a66d656469756da3475055a967726f75705f6964780081a474797065b0416c6c426c6f636b73436c656172656403"
    ),
}


@each_row("version", [*RECORDED])
def test_recorded_bytes(version: str) -> None:
    batch = decode(bytes.fromhex(RECORDED[version]))
    stored, removed, cleared = batch.events
    assert (batch.rank, batch.unknown) == (3, 0)
    assert isinstance(stored, BlockStored)
    assert stored.block_hashes == [b"\1" * 8, b"\2" * 8]
    assert stored.parent_block_hash is None
    assert (stored.token_ids, stored.block_size) == ([11, 12, 13, 14], 2)
    assert (stored.lora_id, stored.lora_name, stored.medium, stored.group_idx) == (None, None, "GPU", 0)
    assert stored.extra_keys == [None, ["salt"]]
    assert stored.kv_cache_spec_kind == (None if version == "0.21.0" else "full_attention")
    assert stored.lookahead_token_ids == ([[1]] if version == "0.33.0" else None)
    assert isinstance(removed, BlockRemoved)
    assert (removed.block_hashes, removed.medium, removed.group_idx) == ([b"\1" * 8], "GPU", 0)
    assert isinstance(cleared, AllBlocksCleared)


@each_row(
    "batch, rank, unknown",
    [
        ([1.0, [["AllBlocksCleared"]]], None, 0),
        ({"ts": 1.0, "events": [["AllBlocksCleared"]], "data_parallel_rank": 2}, 2, 0),
        ([1.0, [["BlocksMoved", 1], ["AllBlocksCleared"]], 0], 0, 1),
        ([1.0, [{"type": "BlocksMoved", "to": 1}, ["AllBlocksCleared"]], 0], 0, 1),
    ],
)
def test_a_batch_may_have_no_rank_be_a_map_and_have_events_of_unknown_types(
    batch: object, rank: int | None, unknown: int
) -> None:
    read = decode(msgspec.msgpack.encode(batch))
    assert (read.rank, read.unknown, len(read.events)) == (rank, unknown, 1)
    assert isinstance(read.events[0], AllBlocksCleared)


def test_fields_that_later_versions_add_are_ignored() -> None:
    removed = {"type": "BlockRemoved", "block_hashes": [b"a"], "medium": "GPU", "colour": "blue"}
    appended = ["BlockRemoved", [b"a"], "GPU", 0, "LOCAL", None, "blue"]
    batch = decode(msgspec.msgpack.encode([1.0, [removed, appended], 0, "blue"]))
    assert [type(event).__mro__[1] for event in batch.events] == [BlockRemoved, BlockRemoved]


@each_row(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([1.0, [["BlockRemoved", "not a list", None]], 0]),
        msgspec.msgpack.encode([1.0, [{"type": "BlockStored", "block_hashes": [b"a"]}], 0]),
        msgspec.msgpack.encode([1.0, [{"type": 3}], 0]),
        msgspec.msgpack.encode([1.0, [[]], 0]),
        msgspec.msgpack.encode([1.0, [7], 0]),
        msgspec.msgpack.encode({"events": 3}),
    ],
)
def test_what_cannot_be_read_is_an_error(payload: bytes) -> None:
    with pytest.raises(BadEventsError):
        decode(payload)


@given(payload=st.binary(max_size=200))
def test_no_bytes_raise_anything_else(payload: bytes) -> None:
    with suppress(BadEventsError):
        assert isinstance(decode(payload).events, list)
