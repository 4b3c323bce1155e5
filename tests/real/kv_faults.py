"""Faults of a KV connector inside a running engine, told by files: a vLLM plugin, loaded beside pdserve's own.

FOLDER/hold-loads   while it exists, loads from LMCache are not started; then they are, into the blocks they had.
FOLDER/hold-steps   while it exists, the worker begins no step. Unlike a stopped process it is nothing that a supervisor
                    sees: the engine has requests and answers none.
FOLDER/other-kv     of the prompts that decode receives, every third then has the KV of the one that was received
                    before it
FOLDER/recompute    of the prompts that decode is to load, every third is computed by decode instead; its KV is released
FOLDER/lost         holds the name of a prefill, all of whose transfers fail
FOLDER/stale-chunk  what prefill loads from LMCache begins with the chunk that was loaded first since the file was made

FOLDER is KV_FAULTS_FOLDER. The first dimension of a layer's KV is the block, as on vLLM's CPU backend.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

FOLDER = "KV_FAULTS_FOLDER"
NAME = "kv_faults"
HOLD_LOADS, HOLD_STEPS = "hold-loads", "hold-steps"
OTHER_KV, RECOMPUTE, LOST, STALE_CHUNK = "other-kv", "recompute", "lost", "stale-chunk"
_EVERY = 3


def installed(folder: Path) -> dict[str, str]:
    """The environment with which an engine loads this plugin; `folder` is where its files go."""
    info = folder / f"{NAME}-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{NAME} = {__name__}:load\n")
    root = Path(__file__).parents[2]
    return {"PYTHONPATH": f"{folder}{os.pathsep}{root}", "VLLM_PLUGINS": NAME, FOLDER: str(folder)}


@contextmanager
def held(order: Path) -> Iterator[None]:
    """For the time of a `with` block; `order`: the file of what is held."""
    order.touch()
    try:
        yield
    finally:
        order.unlink()


def load() -> None:
    """What vLLM calls in each of its processes; only a worker's connector reports transfers and starts loads."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    create = KVConnectorFactory.create_connector
    folder = Path(os.environ[FOLDER])

    # Not the classes: whatever imports lmcache before the worker's kernels are registered breaks their registration.
    def create_connector(*args: Any, **kwargs: Any) -> Any:
        connector = create(*args, **kwargs)
        if hasattr(connector, "worker_adapter"):
            _hold_loads(connector, folder / HOLD_LOADS)
        _hold_steps(connector, folder / HOLD_STEPS)
        _corrupt(connector, folder)
        return connector

    KVConnectorFactory.create_connector = create_connector


def _hold_loads(connector: Any, order: Path) -> None:
    submit, report = connector.worker_adapter.batched_submit_retrieve_requests, connector.get_transfer_results
    held: list[tuple[Any, Any]] = []

    def batched_submit_retrieve_requests(*args: Any, **kwargs: Any) -> None:
        if order.exists():
            held.append((args, kwargs))
        else:
            submit(*args, **kwargs)

    def get_transfer_results(finished_req_ids: set[str]) -> Any:
        if held and not order.exists():
            for args, kwargs in held:
                submit(*args, **kwargs)
            held.clear()
        return report(finished_req_ids)

    connector.worker_adapter.batched_submit_retrieve_requests = batched_submit_retrieve_requests
    connector.get_transfer_results = get_transfer_results


def _hold_steps(connector: Any, order: Path) -> None:
    begin = connector.start_load_kv

    def start_load_kv(*args: Any, **kwargs: Any) -> None:
        while order.exists():
            time.sleep(0.01)
        begin(*args, **kwargs)

    connector.start_load_kv = start_load_kv


def _corrupt(connector: Any, folder: Path) -> None:
    """On a connector, or on the children of a MultiConnector, in whichever process it is."""
    for child in getattr(connector, "_connectors", [connector]):
        if getattr(child, "connector_worker", None) is not None:
            _spoil_received(child.connector_worker, folder)
            _lose_transfers(child.connector_worker, folder)
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
            if blocks and next(numbers) % _EVERY == 0 and (folder / OTHER_KV).exists():
                for layer in layers:
                    _copy(layer, earlier[-1], blocks)
            earlier[:] = [blocks] if blocks else earlier
        return sent, received

    worker.register_kv_caches, worker.start_load_kv, worker.get_finished = (
        register_kv_caches,
        start_load_kv,
        get_finished,
    )


def _lose_transfers(worker: Any, folder: Path) -> None:
    if not hasattr(worker, "_send_blocks"):
        return  # NIXL's decode pulls: prefill sends nothing that could be lost
    send: Callable[[str, Sequence[int], Sequence[int], Sequence[int]], int] = worker._send_blocks
    lost = folder / LOST
    name = Path(os.environ.get("PDSERVE_PATCH_RECORD", "")).name

    def send_blocks(session: str, sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int]) -> int:
        if lost.exists() and lost.read_text() == name:
            return -1
        return send(session, sources, targets, lengths)

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
