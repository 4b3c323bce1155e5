"""Reloads against a real LMCache server (the installed release, on CPU): bytes, ranks, queues, ways of moving KV."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.upstream.run import IN_RELEASE, INSTALLED_VLLM, on

if IN_RELEASE:
    import torch
    import zmq
    from lmcache.integration.vllm.kv_cache_groups import create_engine_group_infos_from_vllm
    from lmcache.integration.vllm.vllm_multi_process_adapter import (
        LMCacheMPSchedulerAdapter,
        LMCacheMPWorkerAdapter,
        LoadStoreOp,
        ParallelStrategy,
    )

    from tests.upstream.lmcache_engine import BLOCK, CHUNK, OURS, THEIRS
    from tests.upstream.lmcache_server import Engine, leaf, server

WORKLOADS = 8
BURST = 24
"""Stores of 512 tokens, 16 MiB each."""
_contexts: list[Any] = []
"""Kept to the end: one that is collected waits for its sockets."""


@on(INSTALLED_VLLM)
def test_a_reload_writes_only_beyond_a_local_prefix_and_is_right_in_every_byte() -> None:
    """Also where that prefix ends inside a chunk, so nothing need be computed up to the boundary first: upstream's
    skip_first_n_tokens. In each step the engines assert every byte that is reloaded, attended to and stored, and that
    no block outside a reload changes; with caps and minima."""
    with server() as at:
        inside_a_chunk(at)
        runs = [random_engines(at, seed) for seed in range(WORKLOADS)]
    assert sum(tokens % CHUNK != 0 for run in runs for tokens in run) > 5


def inside_a_chunk(at: Any) -> None:
    """Another engine has stored 512 tokens, mark 1; this one computes the first 48 itself, mark 2, then reloads. Of
    these the first chunk (64) has three blocks."""
    prompt = [random.Random(1).randrange(1000) for _ in range(520)]
    first = Engine(at, leaf(at, THEIRS), mark=1)
    first.lab.add("stored", prompt, max_tokens=1)
    first.run()
    first.close()
    at.until_stored(512 // CHUNK)
    second = Engine(at, leaf(at, THEIRS), mark=2)
    second.lab.add("warm", [*prompt[:48], 1, 2, 3], max_tokens=1)
    second.run()
    second.lab.add("reload", prompt, max_tokens=8)
    while not second.loaded:
        second.step()
    assert second.marks("reload", 512) == [2] * 3 + [1] * (512 // BLOCK - 3)
    second.run()
    assert (second.local_at_load, second.close()) == ([48], 0)


def random_engines(at: Any, seed: int) -> list[int]:
    """Engines one after another, whose prompts share what earlier ones have stored and what they have themselves: local
    tokens of each reload."""
    dice = random.Random(seed)
    stems = [[dice.randrange(1000) for _ in range(640)] for _ in range(3)]
    local: list[int] = []
    for mark in range(3):
        cap = dice.choice([0, 64, 128, 256])
        extra = {"pdserve.max_tokens_per_load": cap, "pdserve.min_load_tokens": min(cap, dice.choice([0, 64]))}
        engine = Engine(at, leaf(at, OURS, **extra), mark=mark)
        for number in range(8):
            stem = dice.choice(stems)
            prompt = stem[: dice.randrange(16, 640)] + [dice.randrange(1000) for _ in range(dice.randrange(1, 40))]
            engine.lab.add(f"s{seed}m{mark}r{number}", prompt, max_tokens=dice.choice([1, 5]))
            for _ in range(dice.choice([0, 2, 8])):
                engine.step()
        engine.run()
        assert engine.close() == 0, "locks that stay while it lives"
        local += engine.local_at_load
    assert local, f"seed {seed} reloads nothing"
    return local


class Worker:
    """One rank. What it stores are zeros: the cases are about when and whether, not about contents."""

    def __init__(self, at: Any, rank: int = 0, ranks: int = 1, *, mode: str, timeout: float = 60.0) -> None:
        self._adapter = LMCacheMPWorkerAdapter(
            f"tcp://127.0.0.1:{at.port}",
            _context(),
            "model",
            BLOCK,
            _strategy(rank, ranks),
            extra_config={"lmcache.mp.mq_timeout": timeout, "lmcache.mp.mp_transfer_mode": mode},
        )
        self.kv = {f"layer.{index}": torch.zeros(64, BLOCK, 1, 1024) for index in range(8)}
        hints = {"kv_layout": "NHD"}
        infos = create_engine_group_infos_from_vllm(None, self.kv, layout_hints=hints)
        self._adapter.register_kv_caches(self.kv, engine_group_infos=infos, layout_hints=hints)

    def store(self, request: str, tokens: list[int], end: int) -> Any:
        self._adapter.submit_store_request(request, _operation(tokens, end), self._adapter.create_recorded_event())
        return self._adapter.store_futures[request]

    def retrieve(self, request: str, tokens: list[int], end: int) -> Any:
        self._adapter.submit_retrieve_request(request, _operation(tokens, end), self._adapter.create_recorded_event())
        return self._adapter.retrieve_futures[request][0]

    def heard(self) -> None:
        """Returns when the server has taken in all that was asked before: it reads in order, and answers this itself,
        while stores and retrieves wait for its threads."""
        self._adapter.req_client.get_chunk_size().result(timeout=60)

    def close(self) -> None:
        self._adapter.shutdown()


class Lookups:
    """The scheduler's half."""

    def __init__(self, at: Any, ranks: int) -> None:
        self._adapter = LMCacheMPSchedulerAdapter(
            server_urls=[f"tcp://127.0.0.1:{at.port}"],
            context=_context(),
            model_name="model",
            vllm_block_size=BLOCK,
            parallel_strategy=_strategy(0, ranks),
            extra_config={"lmcache.mp.mq_timeout": 60.0},
        )

    def find(self, request: str, tokens: list[int]) -> int:
        """Tokens of the hit; its locks are kept."""
        self._adapter.maybe_submit_lookup_request(request, tokens)
        while (hit := self._adapter.check_lookup_result(request)) is None:
            time.sleep(0.005)
        return int(hit)

    def settled(self, request: str, tokens: list[int], wanted: int) -> int:
        """The hit, once it is `wanted` or 60 s are over: a store is admitted after it has been reported as done."""
        for attempt in range(600):
            name = f"{request}, {attempt}"
            hit = self.find(name, tokens)
            self._adapter.free_lookup_locks(tokens, 0, hit, name)
            self._adapter.cleanup_lookup_result(name)
            self._adapter.end_session(name)
            if hit == wanted:
                break
            time.sleep(0.1)
        return hit

    def close(self) -> None:
        self._adapter.shutdown()


@contextmanager
def two_ranks(at: Any, mode: str) -> Iterator[tuple[list[Worker], Lookups]]:
    ranks, lookups = [Worker(at, rank, 2, mode=mode) for rank in range(2)], Lookups(at, 2)
    try:
        yield ranks, lookups
    finally:
        for each in (lookups, *ranks):
            each.close()  # type: ignore[attr-defined]


def hit_of_all_ranks(at: Any) -> None:
    """A hit is what every rank has stored: one lookup covers the objects of all ranks, so that no rank answers for
    itself, and none can answer 0 by mistake."""
    tokens = list(range(256))
    with two_ranks(at, "engine_driven") as (ranks, lookups):
        for rank, end, hit in ((0, 256, 0), (1, 128, 128), (1, 256, 256)):
            ranks[rank].store(f"{rank}, {end}", tokens, end).result(timeout=60)
            assert lookups.settled(f"{rank}, {end}", tokens, hit) == hit
        assert at.unlocked() == 0


def unfinished_stores(at: Any, *, same_rank: bool) -> int:
    """Return how many of a burst's stores were not finished yet when a reload that came after them was done.

    The reload is of the rank that stores, or of the other one.
    """
    offset = 100_000 * (1 + same_rank)
    wanted = list(range(offset, offset + 512))
    with two_ranks(at, "lmcache_driven") as (ranks, lookups):
        for rank in ranks:
            rank.store(f"wanted{offset}", wanted, 512).result(timeout=60)
        assert lookups.settled(f"sought{offset}", wanted, 512) == 512
        assert lookups.find(f"reload{offset}", wanted) == 512
        starts = range(offset + 1000, offset + 1000 * (BURST + 1), 1000)
        burst = [ranks[0].store(f"burst{start}", list(range(start, start + 512)), 512) for start in starts]
        ranks[0].heard()
        ranks[0 if same_rank else 1].retrieve(f"reload{offset}", wanted, 512).result(timeout=60)
        unfinished = sum(not store.query() for store in burst)
        for store in burst:
            store.result(timeout=60)
    return unfinished


def registration(at: Any, mode: str, *, timeout: float = 3.0) -> str:
    """What becomes of a worker whose way of moving KV the server may not serve, and which waits so many seconds."""
    try:
        Worker(at, mode=mode, timeout=timeout).close()
    except ConnectionError as error:
        return str(error)
    return "registered"


def _context() -> Any:
    """One for each client: a client's monitor is bound under the number of its socket, which the next socket of the
    same context can get before the old monitor is unbound ("Address already in use")."""
    _contexts.append(zmq.Context())
    return _contexts[-1]


def _operation(tokens: list[int], end: int) -> Any:
    return LoadStoreOp(token_ids=tokens, block_ids=[list(range(end // BLOCK))], start=0, end=end)


def _strategy(rank: int, ranks: int) -> Any:
    sizes = {"vllm_world_size": ranks, "vllm_worker_id": rank, "tp_size": ranks, "pp_size": 1, "n_servers": 1}
    return ParallelStrategy(mla_only=False, **sizes)


@on(INSTALLED_VLLM)
def test_with_a_transfer_thread_for_each_rank_no_reload_waits_for_the_stores_of_another_rank() -> None:
    """LMCache's default is one thread for all; pdserve plans one for each engine worker (--max-workers). A reload waits
    for the earlier stores of its own rank, as it must: one of a preempted request may still read the reload's blocks.

    A worker whose way of moving KV the server does not serve waits until its timeout, and blames the network, also with
    both sides' defaults on CPU: so pdserve names the mode on both and compares them in the recipe."""
    try:
        with server(l1_gb=1.5, workers=1, mode="lmcache_driven") as at:
            for mode in ("engine_driven", "auto"):
                assert "Is the server running?" in registration(at, mode)
            assert unfinished_stores(at, same_rank=False) == 0
        with server(l1_gb=1.5, workers=2) as at:
            assert registration(at, "engine_driven", timeout=60.0) == "registered"
            hit_of_all_ranks(at)
            assert unfinished_stores(at, same_rank=False) > BURST / 2
            assert unfinished_stores(at, same_rank=True) == 0
    finally:
        # LMCache leaves the storage of a lmcache_driven worker on CPU behind.
        for segment in Path("/dev/shm").glob(f"lmcache_kv_{os.getpid()}_*"):
            segment.unlink()
