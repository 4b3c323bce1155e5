"""KV that is wrong, and loads that do not happen, inside running engines: tests/real/kv_faults.py installs them.

While one of these files exists in the folder of kv_faults:

FOLDER/other-kv     of the prompts that decode receives, every third then has the KV of the one that was received
                    before it
FOLDER/zero-layer   of every third, the last layer is zero
FOLDER/recompute    of the prompts that decode is to load, every third is computed by decode instead; its KV is released
FOLDER/cut          of the transfers of prefill, every third ends after half of its blocks, as a failure
FOLDER/lost         holds the name of a prefill, all of whose transfers fail
FOLDER/stale-chunk  what prefill loads from LMCache begins with the chunk that was loaded first since the file was made

The first dimension of a layer's KV is the block, as on vLLM's CPU backend.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

OTHER_KV, ZERO_LAYER, RECOMPUTE, CUT, STALE_CHUNK = "other-kv", "zero-layer", "recompute", "cut", "stale-chunk"
LOST = "lost"
_EVERY = 3


def install(connector: Any, folder: Path) -> None:
    """On a connector, or on the children of a MultiConnector, in whichever process it is."""
    for child in getattr(connector, "_connectors", [connector]):
        if getattr(child, "connector_worker", None) is not None:
            _spoil_received(child.connector_worker, folder)
            _cut_transfers(child.connector_worker, folder)
        if getattr(child, "connector_scheduler", None) is not None:
            _compute_again(child.connector_scheduler, folder / RECOMPUTE)
        if hasattr(child, "worker_adapter"):
            _load_stale_chunks(child.worker_adapter, folder / STALE_CHUNK)


def _spoil_received(worker: Any, folder: Path) -> None:
    """Once all of a prompt's KV is there, and before the engine uses it."""
    register, start, finished = worker.register_kv_caches, worker.start_load_kv, worker.get_finished
    layers: list[Any] = []
    blocks_of: dict[str, list[int]] = {}
    earlier: list[list[int]] = []
    numbers = count(1)

    def register_kv_caches(kv_caches: dict[str, Any]) -> None:
        layers.extend(kv_caches.values())
        register(kv_caches)

    def start_load_kv(metadata: Any) -> None:
        for pulls in metadata.reqs_to_recv.values():
            for request, pull in pulls.items():
                blocks_of[request] = [block for group in pull.local_block_ids for block in group]
        start(metadata)

    def get_finished() -> Any:
        sent, received = finished()
        for request in sorted(received or ()):
            blocks = blocks_of.pop(request, [])
            if blocks and next(numbers) % _EVERY == 0:
                if (folder / OTHER_KV).exists():
                    for layer in layers:
                        _copy(layer, earlier[-1], blocks)
                if (folder / ZERO_LAYER).exists():
                    layers[-1][blocks] = 0
            earlier[:] = [blocks] if blocks else earlier
        return sent, received

    worker.register_kv_caches, worker.start_load_kv, worker.get_finished = (
        register_kv_caches,
        start_load_kv,
        get_finished,
    )


def _cut_transfers(worker: Any, folder: Path) -> None:
    if not hasattr(worker, "_send_blocks"):
        return  # NIXL's decode pulls: prefill sends nothing that could be cut
    send: Callable[[str, Sequence[int], Sequence[int], Sequence[int]], int] = worker._send_blocks
    order, lost, numbers = folder / CUT, folder / LOST, count(1)
    name = Path(os.environ.get("PDSERVE_PATCH_RECORD", "")).name

    def send_blocks(session: str, sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int]) -> int:
        if lost.exists() and lost.read_text() == name:
            return -1
        if not order.exists() or next(numbers) % _EVERY:
            return send(session, sources, targets, lengths)
        half = len(sources) // 2
        if half:
            send(session, sources[:half], targets[:half], lengths[:half])
        return -1

    worker._send_blocks = send_blocks


def _compute_again(scheduler: Any, order: Path) -> None:
    match = scheduler.get_num_new_matched_tokens
    seen: dict[str, int] = {}

    def get_num_new_matched_tokens(request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        tokens, later = match(request, num_computed_tokens)
        # The scheduler asks again while it has no blocks for the request.
        if order.exists() and tokens and seen.setdefault(request.request_id, len(seen)) % _EVERY == 0:
            return 0, False
        return tokens, later

    scheduler.get_num_new_matched_tokens = get_num_new_matched_tokens


def _load_stale_chunks(adapter: Any, order: Path) -> None:
    finished = adapter.get_finished
    kept: list[Any] = []

    def get_finished(*args: Any) -> Any:
        loads = {request: blocks for request, (_, blocks) in adapter.retrieve_futures.items()}
        stored, loaded = finished(*args)
        layers = list(adapter.kv_caches.values())
        if not order.exists():
            kept.clear()
            return stored, loaded
        for request in sorted(loaded or ()):
            chunk = loads.get(request, [])[: adapter.blocks_in_chunk]
            if not kept:
                kept.extend(layer[chunk].clone() for layer in layers)
            for layer, stale in zip(layers, kept, strict=True):
                layer[chunk] = stale[: len(chunk)]
        return stored, loaded

    adapter.get_finished = get_finished


def _copy(layer: Any, sources: Sequence[int], targets: Sequence[int]) -> None:
    """As many blocks as both have."""
    size = min(len(sources), len(targets))
    layer[list(targets[:size])] = layer[list(sources[:size])].clone()
