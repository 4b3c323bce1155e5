"""Several workers of one engine on a real LMCache server, by LMCache's own adapters: no scheduler, no model.

`python -m tests.upstream.probes.lmcache_workers`: JSON of the cases below.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import zmq
from lmcache.integration.vllm.kv_cache_groups import create_engine_group_infos_from_vllm
from lmcache.integration.vllm.vllm_multi_process_adapter import (
    LMCacheMPSchedulerAdapter,
    LMCacheMPWorkerAdapter,
    LoadStoreOp,
    ParallelStrategy,
)

from tests.upstream.probes.lmcache_server import Server, server

BLOCK, CHUNK, LAYERS, WIDTH = 16, 64, 8, 1024
HINTS = {"kv_layout": "NHD"}
BURST = 24
"""Stores of 512 tokens, 16 MiB each."""
_CONTEXTS: list[zmq.Context[Any]] = []
"""Kept to the end: one that is collected waits for its sockets."""


class Worker:
    """One rank. What it stores are zeros: the cases are about when and whether, not about contents."""

    def __init__(self, at: Server, *, rank: int, ranks: int, mode: str, timeout: float = 60.0) -> None:
        self._adapter = LMCacheMPWorkerAdapter(
            f"tcp://127.0.0.1:{at.port}",
            _context(),
            "model",
            BLOCK,
            _strategy(rank, ranks),
            extra_config={"lmcache.mp.mq_timeout": timeout, "lmcache.mp.mp_transfer_mode": mode},
        )
        self.kv = {f"layer.{index}": torch.zeros(64, BLOCK, 1, WIDTH) for index in range(LAYERS)}
        infos = create_engine_group_infos_from_vllm(None, self.kv, layout_hints=HINTS)
        self._adapter.register_kv_caches(self.kv, engine_group_infos=infos, layout_hints=HINTS)

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

    def __init__(self, at: Server, ranks: int) -> None:
        self._adapter = LMCacheMPSchedulerAdapter(
            server_urls=[f"tcp://127.0.0.1:{at.port}"],
            context=_context(),
            model_name="model",
            vllm_block_size=BLOCK,
            parallel_strategy=_strategy(0, ranks),
            extra_config={"lmcache.mp.mq_timeout": 60.0},
        )

    def find(self, request: str, tokens: list[int]) -> int:
        """Tokens of the hit; its locks are kept until `forget`."""
        self._adapter.maybe_submit_lookup_request(request, tokens)
        while (hit := self._adapter.check_lookup_result(request)) is None:
            time.sleep(0.005)
        return int(hit)

    def settled(self, request: str, tokens: list[int], wanted: int) -> int:
        """The hit, once it is `wanted` or 60 s are over: a store is admitted after it has been reported as done."""
        for attempt in range(600):
            hit = self.find(f"{request}, {attempt}", tokens)
            self.forget(f"{request}, {attempt}", tokens, hit)
            if hit == wanted:
                break
            time.sleep(0.1)
        return hit

    def forget(self, request: str, tokens: list[int], hit: int) -> None:
        self._adapter.free_lookup_locks(tokens, 0, hit, request)
        self._adapter.cleanup_lookup_result(request)
        self._adapter.end_session(request)

    def close(self) -> None:
        self._adapter.shutdown()


def hit_of_all_ranks(at: Server) -> dict[str, Any]:
    """Two ranks, of which one has stored more than the other."""
    tokens = list(range(256))
    results: dict[str, Any] = {}
    ranks = [Worker(at, rank=rank, ranks=2, mode="engine_driven") for rank in range(2)]
    lookups = Lookups(at, 2)
    for case, rank, end in (("rank 0 alone", 0, 256), ("half of rank 1", 1, 128), ("all of rank 1", 1, 256)):
        ranks[rank].store(case, tokens, end).result(timeout=60)
        results[case] = lookups.settled(case, tokens, end if rank else 0)
    results["locked"] = at.settled("read_locked_count", 0)
    lookups.close()
    for worker in ranks:
        worker.close()
    return results


def reload_during_a_burst(at: Server, *, same_rank: bool) -> int:
    """How many of a burst's stores were not finished yet when a reload that came after them was done.

    The reload is of the rank that stores, or of the other one.
    """
    offset = 100_000 * (1 + same_rank)
    wanted = list(range(offset, offset + 512))
    ranks = [Worker(at, rank=rank, ranks=2, mode="lmcache_driven") for rank in range(2)]
    for rank in ranks:
        rank.store(f"wanted{offset}", wanted, 512).result(timeout=60)
    lookups = Lookups(at, 2)
    assert lookups.settled(f"sought{offset}", wanted, 512) == 512
    assert lookups.find(f"reload{offset}", wanted) == 512
    burst = [
        ranks[0].store(f"burst{start}", list(range(start, start + 512)), 512)
        for start in range(offset + 1000, offset + 1000 * (BURST + 1), 1000)
    ]
    ranks[0].heard()
    ranks[0 if same_rank else 1].retrieve(f"reload{offset}", wanted, 512).result(timeout=60)
    unfinished = sum(not store.query() for store in burst)
    for store in burst:
        store.result(timeout=60)
    lookups.close()
    for worker in ranks:
        worker.close()
    return unfinished


def registration(at: Server, mode: str, *, timeout: float = 3.0) -> str:
    """What becomes of a worker whose way of moving KV the server may not serve, and which waits so many seconds."""
    begin = time.monotonic()
    try:
        Worker(at, rank=0, ranks=1, mode=mode, timeout=timeout).close()
    except ConnectionError as error:
        return f"after {time.monotonic() - begin:.0f} s: {error}"
    return "registered"


def _context() -> zmq.Context[Any]:
    """One for each client: a client's monitor is bound under the number of its socket, which the next socket of the
    same context can get before the old monitor is unbound ("Address already in use")."""
    _CONTEXTS.append(zmq.Context())
    return _CONTEXTS[-1]


def _operation(tokens: list[int], end: int) -> LoadStoreOp:
    return LoadStoreOp(token_ids=tokens, block_ids=[list(range(end // BLOCK))], start=0, end=end)


def _strategy(rank: int, ranks: int) -> ParallelStrategy:
    return ParallelStrategy(
        mla_only=False, vllm_world_size=ranks, vllm_worker_id=rank, tp_size=ranks, pp_size=1, n_servers=1
    )


def main() -> None:
    try:
        print(json.dumps(cases()))
    finally:
        # LMCache leaves the storage of a lmcache_driven worker on CPU behind.
        for segment in Path("/dev/shm").glob(f"lmcache_kv_{os.getpid()}_*"):
            segment.unlink()


def cases() -> dict[str, Any]:
    results: dict[str, Any] = {}
    with server(chunk=CHUNK, l1_gb=1.5, workers=1, mode="lmcache_driven") as at:
        results["engine_driven worker, lmcache_driven server"] = registration(at, "engine_driven")
        results["worker left to itself, lmcache_driven server"] = registration(at, "auto")
        results["one thread, other rank"] = reload_during_a_burst(at, same_rank=False)
    with server(chunk=CHUNK, l1_gb=1.5, workers=2, mode="auto") as at:
        results["engine_driven worker, auto server"] = registration(at, "engine_driven", timeout=60.0)
        results["hit"] = hit_of_all_ranks(at)
        results["a thread each, other rank"] = reload_during_a_burst(at, same_rank=False)
        results["a thread each, same rank"] = reload_during_a_burst(at, same_rank=True)
    return results


if __name__ == "__main__":
    main()
