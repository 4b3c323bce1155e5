"""A real LMCache MP server, and an engine on it with real bytes: the real Scheduler and both roles of the connector.

The KV of a token is made of the prefix that ends there, plus the mark of who computed it. So a block shows whether its
content is right, and whether this engine computed it or it came from the server.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

from tests.upstream import lmcache_engine
from tests.upstream.lmcache_engine import BLOCK, CHUNK, computed_before
from tests.upstream.scheduler_lab import Lab, MockConnector

READY_WITHIN_SECONDS, WITHIN_SECONDS = 300.0, 60.0
LAYERS, HEADS, SIZE = 2, 2, 8
MARKS = 8
"""Of engines: contents are (hash of the prefix) * MARKS + mark."""


class Server:
    """`port`: of requests (ZMQ)."""

    def __init__(self, port: int, http_port: int) -> None:
        self.port = port
        self.http_port = http_port
        self.process: subprocess.Popen[bytes] | None = None

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}{path}", timeout=60) as answer:  # loopback
            return json.load(answer)

    def figures(self) -> dict[str, int]:
        """Of what it keeps."""
        status = self.get("/status")
        l1 = status["storage_manager"]["l1_manager"]
        return {
            "objects": l1["total_object_count"],
            "locked": l1["read_locked_count"],
            "jobs": status["active_prefetch_jobs"],
            "sessions": status["active_sessions"],
        }

    def until(self, holds: Callable[[dict[str, int]], bool]) -> dict[str, int]:
        """Its figures as soon as it is so, or the last ones: what it is told, it does a little later."""
        deadline = time.monotonic() + WITHIN_SECONDS
        while not holds(figures := self.figures()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return figures

    def until_stored(self, objects: int, within_seconds: float = WITHIN_SECONDS) -> None:
        """Wait until so many can be found: a store is admitted after it has been reported as done."""
        deadline = time.monotonic() + within_seconds
        while (l1 := self.get("/status")["storage_manager"]["l1_manager"]) and (
            l1["total_object_count"] - l1["staging_object_count"] < objects
        ):
            assert time.monotonic() < deadline, l1
            time.sleep(0.02)

    def unlocked(self) -> int:
        """Read locks, once there are none or the time is over: releases are not acknowledged."""
        return self.until(lambda figures: not figures["locked"])["locked"]

    @contextmanager
    def silent(self) -> Iterator[None]:
        """It answers nothing meanwhile: a quick server would answer a lookup within the step that sent it."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def argv(self, *, l1_gb: float = 0.25, workers: int = 1, mode: str = "auto") -> list[str]:
        flags = {
            **{"--host": "127.0.0.1", "--port": self.port, "--http-host": "127.0.0.1", "--http-port": self.http_port},
            **{"--l1-size-gb": l1_gb, "--eviction-policy": "LRU", "--chunk-size": CHUNK},
            **{"--max-workers": workers, "--supported-transfer-mode": mode},
        }
        return ["--no-l1-use-lazy", *(str(each) for flag in flags.items() for each in flag)]


@contextmanager
def server(**how: Any) -> Iterator[Server]:
    """On free ports of the loopback; keywords of Server.argv."""
    started = Server(*_free_ports())
    with tempfile.TemporaryFile() as log:
        started.process = process = subprocess.Popen(
            [sys.executable, "-m", "lmcache.v1.multiprocess.http_server", *started.argv(**how)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"},
        )
        try:
            deadline = time.monotonic() + READY_WITHIN_SECONDS
            while not _answers(started):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise RuntimeError(f"the server did not get ready: {log.read()[-3000:].decode(errors='replace')}")
                time.sleep(0.1)
            yield started
        finally:
            process.terminate()
            process.wait(30)


def _answers(started: Server) -> bool:
    try:
        started.get("/healthcheck")
    except (urllib.error.URLError, OSError):
        return False
    return True


def _free_ports() -> list[int]:
    with socket.socket() as first, socket.socket() as other:
        first.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return [first.getsockname()[1], other.getsockname()[1]]


def leaf(at: Server, module: str, **extra: Any) -> dict[str, Any]:
    """LMCache's kv-transfer-config, for that server."""
    where = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": at.port, "lmcache.mp.mq_timeout": WITHIN_SECONDS}
    return lmcache_engine.leaf(module, **where, **{"lmcache.mp.mp_transfer_mode": "engine_driven", **extra})


class Engine:
    """One engine on the server. `mark`: told apart from the engines that stored before it. `connector`: LMCache's, or
    MultiConnector's over a mock and LMCache's. `in_step`: loads have arrived with the step that begins them."""

    in_step = True

    def __init__(
        self, at: Server, connector: Mapping[str, Any], *, mark: int, num_blocks: int = 96, **lab: Any
    ) -> None:
        self.mark = mark
        self._at = at
        self.lab = Lab(num_blocks=num_blocks, max_num_batched_tokens=256, connector=connector, **lab)
        self.kv = {f"layer.{index}": torch.zeros(num_blocks, BLOCK, HEADS, SIZE) for index in range(LAYERS)}
        self._in_multi = hasattr(self.lab.connector, "_connectors")
        self.connector = self.lab.connector._connectors[1] if self._in_multi else self.lab.connector
        self.worker: Any = self._worker()
        self.worker.register_kv_caches(self.kv)
        self.local_at_load: list[int] = []
        """Tokens that the engine had itself, of each reload."""
        self.loaded = 0
        self._ended: set[str] = set()
        self._loads_of_mock = 0

    def _worker(self) -> Any:
        spec = self.lab.scheduler.kv_cache_config.kv_cache_groups[0].kv_cache_spec
        groups = [KVCacheGroupSpec(list(self.kv), spec)]
        layout = KVCacheConfig(num_blocks=self.lab.pool.num_gpu_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        config = self.lab.config
        if self._in_multi:
            (_, (_, config)) = type(self.lab.connector)._get_connector_classes_and_configs(config)
        return KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, layout)

    def close(self, locked: int | None = None) -> int:
        """Ends it once it has no lock left. Returns the locks that it kept all the same.

        Not before: LMCache handles UNREGISTER at once and FREE_LOOKUP_LOCKS in a thread, where it fails when it comes
        after the last engine of the model has gone (lmcache 0.5.6, engine_context.py: find_attn_desc raises).
        """
        locked = self._at.unlocked() if locked is None else locked
        self.worker.shutdown()
        self.lab.connector.shutdown()
        return locked

    def run(self) -> None:
        deadline = time.monotonic() + WITHIN_SECONDS
        # As an engine does, which steps while locks of lookups that came too late are to be given back.
        while self.lab.scheduler.requests or self.lab.connector.has_pending_push_work():
            assert time.monotonic() < deadline, f"still there: {sorted(self.lab.scheduler.requests)}"
            self.step()
        for _ in range(3):
            self.step()

    def step(self) -> None:
        before = set(self.lab.scheduler.requests)
        output = self.lab.schedule()
        metadata = output.kv_connector_metadata
        arrived = set()
        if self._in_multi:
            metadata = metadata.metadata[1]
            arrived = self._load_from_mock()
        self.worker.bind_connector_metadata(metadata)
        self.worker.handle_preemptions(metadata)
        self._load(metadata)
        for name, tokens in output.num_scheduled_tokens.items():
            self._compute(name, tokens, computed_before(output, name))
        self.worker.wait_for_save()
        sent, received = self.worker.get_finished(self._ended)
        self.worker.clear_connector_metadata()
        arrived = {name for name in {*arrived, *(received or ())} if self.lab.get(name) is not None}
        sent = {name for name in sent or () if self.lab.get(name) is not None} - arrived
        failed = self.worker.get_block_ids_with_load_errors()
        self.lab.update(output, finished_recving=arrived, finished_sending=sent, invalid_block_ids=failed)
        self._ended = {name for name in before if (kept := self.lab.get(name)) is not None and kept.is_finished()}

    def _load_from_mock(self) -> set[str]:
        (mock, _) = self.lab.connector._connectors
        assert isinstance(mock, MockConnector)
        loads, self._loads_of_mock = mock.book.loads[self._loads_of_mock :], len(mock.book.loads)
        for load in loads:
            self._write(
                list(load.blocks[0]), _names(list(self.lab.get(load.request_id).all_token_ids))[: load.tokens], 0
            )
        return {load.request_id for load in loads}

    def _load(self, metadata: Any) -> None:
        before = {layer: tensor.clone() for layer, tensor in self.kv.items()}
        self.worker.start_load_kv(None)
        expected: set[int] = set()
        for op in (request.op for request in metadata.requests if request.direction == "RETRIEVE"):
            blocks, first = op.block_ids[0], op.start + op.skip_first_n_tokens
            self.local_at_load.append(first)
            self.loaded += op.end - first
            if self.in_step:
                names = _names(list(op.token_ids))
                self._check(blocks, first - op.start, names[op.start : op.end], f"loaded from {op.start} on")
            expected |= set(blocks[(first - op.start) // BLOCK :])
        changed = {
            index
            for layer, tensor in self.kv.items()
            for index in torch.nonzero((tensor != before[layer]).flatten(1).any(1)).flatten().tolist()
        }
        assert not self.in_step or changed <= expected, f"{sorted(changed - expected)}: not of the reload, overwritten"

    def _compute(self, name: str, tokens: int, before: int) -> None:
        names = _names(list(self.lab.get(name).all_token_ids)[: before + tokens])
        blocks = self.lab.blocks(name)
        self._check(blocks, 0, names[:before], "attended to")
        self._write(blocks, names, before)

    def _write(self, blocks: list[int], names: list[int], start: int) -> None:
        for position in range(start, len(names)):
            for layer, tensor in enumerate(self.kv.values()):
                tensor[blocks[position // BLOCK], position % BLOCK] = float(
                    (names[position] + layer) * MARKS + self.mark
                )

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


def _names(tokens: list[int]) -> list[int]:
    """Of prefixes; small enough for a float32 to hold with its mark."""
    names, last = [], 0
    for token in tokens:
        last = (last * 31 + token + 1) % 1_000_003
        names.append(last)
    return names
