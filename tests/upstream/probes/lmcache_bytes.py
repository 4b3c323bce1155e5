"""Reloads with real bytes: the real Scheduler, both roles of the connector, and a real LMCache server.

The KV of a token is made of the prefix that ends there, plus the mark of who computed it. So a block shows whether its
content is right, and whether this engine computed it or it came from the server. `python -m ... WORKLOADS`: JSON.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

from tests.upstream.probes.lmcache_engine import OURS
from tests.upstream.probes.lmcache_server import Server, server
from tests.upstream.scheduler_lab import Lab

BLOCK, CHUNK, LAYERS, HEADS, SIZE = 16, 64, 2, 2, 8
MARKS = 8
"""Of engines: contents are (hash of the prefix) * MARKS + mark."""


class Engine:
    """One engine on the server. `mark`: told apart from the engines that stored before it."""

    def __init__(self, at: Server, module: str, extra: dict[str, Any], *, mark: int, num_blocks: int = 96) -> None:
        connector = {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": module,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": at.port,
                "lmcache.mp.mq_timeout": 60.0,
                "lmcache.mp.mp_transfer_mode": "engine_driven",
                **extra,
            },
        }
        self.mark = mark
        self._at = at
        self.lab = Lab(num_blocks=num_blocks, max_num_batched_tokens=256, connector=connector)
        self.kv = {
            f"layer.{index}": torch.zeros(num_blocks, BLOCK, HEADS, SIZE, dtype=torch.float32)
            for index in range(LAYERS)
        }
        spec = self.lab.scheduler.kv_cache_config.kv_cache_groups[0].kv_cache_spec
        config = KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(list(self.kv), spec)]
        )
        self.worker: Any = type(self.lab.connector)(self.lab.config, KVConnectorRole.WORKER, config)
        self.worker.register_kv_caches(self.kv)
        self.local_at_load: list[int] = []
        """Tokens that the engine had itself, of each reload."""
        self.loaded = 0
        self._ended: set[str] = set()

    def close(self) -> int:
        """Ends it once it has no lock left. Returns the locks that it kept all the same.

        Not before: LMCache handles UNREGISTER at once and FREE_LOOKUP_LOCKS in a thread, where it fails when it comes
        after the last engine of the model has gone (lmcache 0.5.6, engine_context.py: find_attn_desc raises).
        """
        locked = self._at.settled("read_locked_count", 0)
        self.worker.shutdown()
        self.lab.connector.shutdown()
        return locked

    def run(self) -> None:
        # As an engine does, which steps while locks of lookups that came too late are to be given back.
        while self.lab.scheduler.requests or self.lab.connector.has_pending_push_work():
            self.step()
        for _ in range(3):
            self.step()

    def step(self) -> None:
        before = set(self.lab.scheduler.requests)
        output = self.lab.schedule()
        metadata = output.kv_connector_metadata
        self.worker.bind_connector_metadata(metadata)
        self.worker.handle_preemptions(metadata)
        self._load(metadata)
        for name, count in output.num_scheduled_tokens.items():
            self._compute(name, count, _computed_before(output, name))
        self.worker.wait_for_save()
        sent, arrived = self.worker.get_finished(self._ended)
        self.worker.clear_connector_metadata()
        arrived = {name for name in arrived or () if self.lab.get(name) is not None}
        sent = {name for name in sent or () if self.lab.get(name) is not None} - arrived
        failed = self.worker.get_block_ids_with_load_errors()
        self.lab.update(output, finished_recving=arrived, finished_sending=sent, invalid_block_ids=failed)
        self._ended = {name for name in before if (kept := self.lab.get(name)) is not None and kept.is_finished()}

    def _load(self, metadata: Any) -> None:
        before = {layer: tensor.clone() for layer, tensor in self.kv.items()}
        self.worker.start_load_kv(None)
        expected: set[int] = set()
        for request in metadata.requests:
            if request.direction != "RETRIEVE":
                continue
            op = request.op
            blocks, first = op.block_ids[0], op.start + op.skip_first_n_tokens
            local = self.lab.get(request.request_id)
            assert local is not None
            names = _names(list(op.token_ids))
            self._check(blocks, first - op.start, names[op.start : op.end], f"loaded from {op.start} on")
            expected |= set(blocks[(first - op.start) // BLOCK :])
            self.local_at_load.append(first)
            self.loaded += op.end - first
        changed = {
            index
            for layer, tensor in self.kv.items()
            for index in torch.nonzero((tensor != before[layer]).flatten(1).any(1)).flatten().tolist()
        }
        assert changed <= expected, f"blocks {sorted(changed - expected)} are not of the reload and were overwritten"

    def _compute(self, name: str, count: int, before: int) -> None:
        names = _names(list(self.lab.get(name).all_token_ids)[: before + count])
        blocks = self.lab.blocks(name)
        self._check(blocks, 0, names[:before], "attended to")
        for position in range(before, before + count):
            for layer, tensor in enumerate(self.kv.values()):
                tensor[blocks[position // BLOCK], position % BLOCK] = _content(names[position], self.mark, layer)

    def _check(self, blocks: list[int], start: int, names: list[int], what: str) -> None:
        """The blocks hold the KV of these prefixes, from the one with index `start` on, in every byte."""
        for layer, tensor in enumerate(self.kv.values()):
            there = tensor[blocks].reshape(-1, HEADS * SIZE)[start : len(names)].long() // MARKS
            wanted = torch.tensor(names[start:]).unsqueeze(1) + layer
            wrong = torch.nonzero((there != wanted).any(1)).flatten().tolist()
            assert not wrong, f"{what}: layer {layer} is not what was computed at {[start + at for at in wrong][:8]}"

    def marks(self, name: str, tokens: int) -> list[int]:
        """Who computed what the blocks of a request have, block by block."""
        blocks = self.lab.blocks(name)[: tokens // BLOCK]
        return [int(self.kv["layer.0"][block].flatten()[0].item()) % MARKS for block in blocks]


def _computed_before(output: Any, name: str) -> int:
    for new in output.scheduled_new_reqs:
        if new.req_id == name:
            return int(new.num_computed_tokens)
    cached = output.scheduled_cached_reqs
    return int(cached.num_computed_tokens[list(cached.req_ids).index(name)])


def _names(tokens: list[int]) -> list[int]:
    """Of prefixes; small enough for a float32 to hold with its mark."""
    names, last = [], 0
    for token in tokens:
        last = (last * 31 + token + 1) % 1_000_003
        names.append(last)
    return names


def _content(name: int, mark: int, layer: int) -> float:
    return float((name + layer) * MARKS + mark)


def inside_a_chunk(at: Server, module: str) -> dict[str, Any]:
    """Another engine has stored 512 tokens; this one computes the first 48 itself, then reloads."""
    prompt = [random.Random(1).randrange(1000) for _ in range(520)]
    first = Engine(at, module, {}, mark=1)
    first.lab.add("stored", prompt, max_tokens=1)
    first.run()
    first.close()
    at.until_stored(512 // CHUNK)
    second = Engine(at, module, {}, mark=2)
    second.lab.add("warm", [*prompt[:48], 1, 2, 3], max_tokens=1)
    second.run()
    second.lab.add("reload", prompt, max_tokens=8)
    while not second.loaded:
        second.step()
    marks = second.marks("reload", 512)
    second.run()
    second.close()
    return {"marks": marks, "local": second.local_at_load, "locked": at.settled("read_locked_count", 0)}


def workload(at: Server, seed: int) -> dict[str, Any]:
    """Engines one after another, whose prompts share what earlier ones have stored and what they have themselves."""
    dice = random.Random(seed)
    stems = [[dice.randrange(1000) for _ in range(640)] for _ in range(3)]
    local: list[int] = []
    loaded = locked = 0
    for mark in range(3):
        cap = dice.choice([0, 64, 128, 256])
        extra = {"pdserve.max_tokens_per_load": cap, "pdserve.min_load_tokens": min(cap, dice.choice([0, 64]))}
        engine = Engine(at, OURS, extra, mark=mark)
        for number in range(8):
            stem = dice.choice(stems)
            prompt = stem[: dice.randrange(16, 640)] + [dice.randrange(1000) for _ in range(dice.randrange(1, 40))]
            engine.lab.add(f"s{seed}m{mark}r{number}", prompt, max_tokens=dice.choice([1, 5]))
            for _ in range(dice.choice([0, 2, 8])):
                engine.step()
        engine.run()
        locked += engine.close()
        local += engine.local_at_load
        loaded += engine.loaded
    return {
        "reloads": len(local),
        "inside a chunk": sum(tokens % CHUNK != 0 for tokens in local),
        "loaded": loaded,
        "locked while it lived": locked,
        "locked": at.settled("read_locked_count", 0),
    }


def main() -> None:
    with server(chunk=CHUNK) as at:
        upstream = "lmcache.integration.vllm.lmcache_mp_connector"
        results = {"inside a chunk": inside_a_chunk(at, upstream)}
        results["workloads"] = [workload(at, seed) for seed in range(int(sys.argv[1]))]  # type: ignore[assignment]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
