"""The index of KV caches equals what the engines hold, as far as their events tell it."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.pd.routing.ask import RoutingRequest
from pdserve.pd.routing.build import make
from pdserve.pd.routing.kv_index import KvIndex
from pdserve.pd.routing.kv_wire import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, Event
from pdserve.pd.routing.policies.kv_events import KvEvents
from tests.proxy.candidates import Worker, everywhere, workers
from tests.proxy.rows import each

BLOCK = 2


def ask(*tokens: int) -> RoutingRequest:
    return RoutingRequest(prompt=b"any text", tokens=tokens, estimate=len(tokens))


def engine_hash(tokens: tuple[int, ...]) -> bytes:
    """What an engine might call the block that ends this prefix."""
    return b"hash of " + bytes(tokens)


def stored(tokens: tuple[int, ...], begin: int = 0, block: int = BLOCK) -> BlockStored:
    """All whole blocks of `tokens` but the first `begin`."""
    end = len(tokens) // block * block
    return BlockStored(
        block_hashes=[engine_hash(tokens[: stop + block]) for stop in range(begin * block, end, block)],
        parent_block_hash=engine_hash(tokens[: begin * block]) if begin else None,
        token_ids=list(tokens[begin * block : end]),
        block_size=block,
        medium="GPU",
        group_idx=0,
    )


def removed(*prefixes: tuple[int, ...]) -> BlockRemoved:
    return BlockRemoved(block_hashes=[engine_hash(prefix) for prefix in prefixes], medium="GPU", group_idx=0)


def held(events: list[Event], *tokens: int) -> int:
    index = KvIndex(1000)
    index.apply("w", 0, events)
    return index.matched("w", ask(*tokens))[0]


def test_whole_blocks_from_the_beginning_on_count() -> None:
    events: list[Event] = [stored((1, 2, 3, 4, 5, 6))]
    assert held(events, 1, 2, 3, 4, 5, 6) == 6
    assert held(events, 1, 2, 3, 4, 5) == 4
    assert held(events, 1, 2, 3, 9, 5, 6) == 2
    assert held(events, 3, 4, 5, 6) == 0
    assert held(events, 1) == 0
    assert held(events) == 0


def test_a_block_is_linked_to_its_parent() -> None:
    assert held([stored((1, 2)), stored((1, 2, 3, 4), begin=1)], 1, 2, 3, 4) == 4
    assert held([stored((1, 2)), stored((9, 9, 3, 4), begin=1)], 1, 2, 3, 4) == 2, "an unknown parent"
    assert held([stored((1, 2, 3, 4), begin=1), stored((1, 2))], 1, 2, 3, 4) == 2, "known too late"


def test_a_removed_block_ends_a_match() -> None:
    events: list[Event] = [stored((1, 2, 3, 4, 5, 6)), removed((1, 2, 3, 4))]
    assert held(events, 1, 2, 3, 4, 5, 6) == 2
    assert held([*events, stored((1, 2, 3, 4), begin=1)], 1, 2, 3, 4, 5, 6) == 6, "its successor was there all the time"


def test_a_removed_parent_is_still_a_parent() -> None:
    """Of two copies of a block one is evicted, which vLLM reports like the eviction of both."""
    events: list[Event] = [stored((1, 2)), removed((1, 2)), stored((1, 2, 3, 4), begin=1), stored((1, 2))]
    assert held(events, 1, 2, 3, 4) == 4


def test_cleared_is_empty() -> None:
    assert held([stored((1, 2, 3, 4)), AllBlocksCleared()], 1, 2) == 0


def test_the_block_size_is_the_event_s() -> None:
    assert held([stored((1, 2, 3, 4), block=4)], 1, 2, 3, 4, 5, 6, 7, 8) == 4


@each("hashes", [[7, 2**64 - 1], [b"seven", b"eight"]])
def test_hashes_are_bytes_or_integers(hashes: list[BlockHash]) -> None:
    first = BlockStored([hashes[0]], None, [1, 2], BLOCK)
    second = BlockStored([hashes[1]], hashes[0], [3, 4], BLOCK)
    assert held([first, second], 1, 2, 3, 4) == 4
    assert held([first, second, BlockRemoved([hashes[1]])], 1, 2, 3, 4) == 2


UNNAMEABLE: dict[str, dict[str, object]] = {
    "lora": {"lora_name": "adapter"},
    "lora id": {"lora_id": 1},
    "cache_salt": {"extra_keys": [["salt"], None, None]},
    "an image": {"extra_keys": [[["image", 0]], [["image", -2]], None]},
    "unknown extra keys": {"extra_keys": [None]},
    "left out blocks": {"token_ids": [1, 2, 3, 4, 5, 6, 7, 8]},
    "no tokens": {"token_ids": []},
    "no block size": {"token_ids": [], "block_size": 0},
    "lookahead": {"lookahead_token_ids": [[9], [9], [9]]},
    "negative ids": {"token_ids": [-1, 2, 3, 4, 5, 6]},
}


@each("why", [*UNNAMEABLE])
def test_what_token_ids_do_not_name_never_matches(why: str) -> None:
    event = stored((1, 2, 3, 4, 5, 6))
    for field, value in UNNAMEABLE[why].items():
        setattr(event, field, value)
    index = KvIndex(1000)
    index.apply("w", 0, [event, stored((1, 2, 3, 4, 5, 6, 7, 8), begin=3)])
    assert index.matched("w", ask(1, 2, 3, 4, 5, 6, 7, 8)) == {0: 0}
    assert index.counts["unnamed"] == 4, "its successor has no name either"
    index.apply("w", 0, [removed((1, 2)), stored((1, 2))])
    assert index.matched("w", ask(1, 2, 3, 4)) == {0: 2}, "the same ids without the rest do"


def test_blocks_before_an_image_match() -> None:
    event = stored((1, 2, 3, 4, 5, 6))
    event.extra_keys = [None, [["image", 0]], None]
    assert held([event], 1, 2, 3, 4, 5, 6) == 2


@each("medium", ["CPU", "cpu", "STORAGE"])
def test_only_the_gpu_counts(medium: str) -> None:
    offloaded = stored((1, 2, 3, 4))
    offloaded.medium = medium
    assert held([stored((1, 2)), offloaded], 1, 2, 3, 4) == 2
    evicted = removed((1, 2))
    evicted.medium = medium
    assert held([stored((1, 2)), evicted], 1, 2, 3, 4) == 2


def test_of_several_groups_the_one_that_holds_least_decides() -> None:
    other = stored((1, 2, 3, 4))
    other.group_idx = 1
    assert held([stored((1, 2, 3, 4, 5, 6)), other], 1, 2, 3, 4, 5, 6) == 4
    gone = removed((1, 2, 3, 4))
    gone.group_idx = 1
    assert held([stored((1, 2, 3, 4, 5, 6)), other, gone], 1, 2, 3, 4, 5, 6) == 2
    wide = stored((1, 2, 3, 4), block=4)
    wide.group_idx = 1
    assert held([stored((1, 2, 3, 4, 5, 6)), wide], 1, 2, 3, 4, 5, 6) == 4


@each("kind", ["sliding_window", "mamba", "chunked_local_attention"])
def test_groups_that_need_no_whole_prefix_do_not_count(kind: str) -> None:
    window = stored((1, 2))
    window.group_idx, window.kv_cache_spec_kind = 1, kind
    assert held([stored((1, 2, 3, 4)), window], 1, 2, 3, 4) == 4


def test_ranks_and_workers_are_apart() -> None:
    index = KvIndex(1000)
    index.apply("a", 0, [stored((1, 2))])
    index.apply("a", 1, [stored((1, 2, 3, 4))])
    index.apply("b", 0, [stored((5, 6))])
    assert index.matched("a", ask(1, 2, 3, 4)) == {0: 2, 1: 4}
    assert index.matched("b", ask(1, 2, 3, 4)) == {0: 0}
    assert index.matched("c", ask(1, 2, 3, 4)) == {}
    index.forget("a", 1)
    assert index.matched("a", ask(1, 2, 3, 4)) == {0: 2}
    index.apply("a", 0, [AllBlocksCleared()])
    assert index.matched("a", ask(1, 2, 3, 4)) == {0: 0}
    index.forget("a")
    assert index.matched("a", ask(1, 2, 3, 4)) == {}
    assert index.matched("b", ask(5, 6)) == {0: 2}


@each("tokens", [None, [-1, 2], [2**40, 1], ["x", "y"]])
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
