"""A real LMCache MP server, and an engine on it with real bytes: the real Scheduler and both roles of the connector.

The KV of a token is made of the prefix that ends there, so a block shows whether its content is right.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

from tests.upstream import lmcache_engine
from tests.upstream.lmcache_engine import BLOCK, CHUNK, computed_before
from tests.upstream.scheduler_lab import Lab

WITHIN_SECONDS = 60.0
LAYERS, HEADS, SIZE, BLOCKS = 2, 2, 8, 96


_PROCESS = """
import ctypes, os, signal, sys
import lmcache.v1.multiprocess.http_server
from pdserve.patches import lmcache_server_main
for _ in sys.stdin:
    if not (pid := os.fork()):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # with this process
        os.dup2(2, 1)
        lmcache_server_main.main()
        os._exit(0)
    print(pid, flush=True)
    while os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1]):
        print("stopped", flush=True)
    print("ended", flush=True)
"""
"""What has imported everything and forks a server at each line: it is there faster than after any restart."""


class Server:
    """One LMCache server after the other on the same ports. `patches`: what each of them applies."""

    def __init__(self, mode: str = "auto", patches: str = "") -> None:
        self.port, self.http_port = _quiet_ports()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the servers
        self._pid: int | None = None
        flags = {
            **{"--host": "127.0.0.1", "--port": self.port, "--http-host": "127.0.0.1", "--http-port": self.http_port},
            **{"--l1-size-gb": 0.25, "--eviction-policy": "LRU", "--chunk-size": CHUNK},
            **{"--max-workers": 1, "--supported-transfer-mode": mode},
        }
        argv = [str(each) for flag in flags.items() for each in flag]
        self._parent = subprocess.Popen(
            [sys.executable, "-c", _PROCESS, "--no-l1-use-lazy", *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "PDSERVE_PATCHES": patches, "LMCACHE_DISABLE_BANNER": "1"},
        )

    def begin(self) -> None:
        """Return when the next one is ready."""
        print(file=self._parent.stdin, flush=True)
        self._pid = int(self._said())
        while not self._answers():
            assert Path(f"/proc/{self._pid}").exists(), self.output()
            time.sleep(0.01)

    def _said(self) -> str:
        assert self._parent.stdout is not None
        line = self._parent.stdout.readline().strip()
        assert line, self.output()
        return line

    def stop(self) -> None:
        """Return when none of its threads runs any more."""
        self._signal(signal.SIGSTOP, "stopped")

    def kill(self) -> None:
        self._signal(signal.SIGKILL, "ended")
        self._pid = None

    def _signal(self, number: signal.Signals, expected: str) -> None:
        assert self._pid is not None
        os.kill(self._pid, number)
        assert self._said() == expected, self.output()

    def close(self) -> None:
        if self._pid is not None:
            self.kill()
        assert self._parent.stdin is not None
        self._parent.stdin.close()
        self._parent.wait()
        # LMCache leaves the storage of a lmcache_driven worker on CPU behind.
        for segment in Path("/dev/shm").glob(f"lmcache_kv_{os.getpid()}_*"):
            segment.unlink()

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            self._get("/healthcheck")
            return True
        return False

    def registered(self, instance: int) -> bool:
        return instance in self._get("/status")["registered_gpu_ids"]

    def output(self) -> str:
        self._log.seek(0)
        return self._log.read()[-3000:].decode(errors="replace")

    def until_stored(self, objects: int, within_seconds: float = WITHIN_SECONDS) -> None:
        """Wait until so many can be found: a store is admitted after it has been reported as done."""
        deadline = time.monotonic() + within_seconds
        while (l1 := self._l1()) and l1["total_object_count"] - l1["staging_object_count"] < objects:
            assert time.monotonic() < deadline, l1
            time.sleep(0.02)

    def unlocked(self) -> int:
        """Return its read locks, once there are none or the time is over: releases are not acknowledged."""
        deadline = time.monotonic() + WITHIN_SECONDS
        while (locked := self._l1()["read_locked_count"]) and time.monotonic() < deadline:
            time.sleep(0.02)
        return locked

    def _l1(self) -> dict[str, int]:
        return dict(self._get("/status")["storage_manager"]["l1_manager"])

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}{path}", timeout=60) as answer:  # loopback
            return json.load(answer)


def _quiet_ports() -> list[int]:
    """Return two that no connection gets as its own: a client that reconnects to a port of the ephemeral range meets
    itself there sooner or later, and the next server cannot bind it."""
    ports: list[int] = []
    while len(ports) < 2:
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port := random.randrange(20000, 30000)))
            ports.append(port)
    return ports


def leaf(at: Server, module: str, **extra: Any) -> dict[str, Any]:
    """LMCache's kv-transfer-config, for that server."""
    where = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": at.port, "lmcache.mp.mq_timeout": WITHIN_SECONDS}
    return lmcache_engine.leaf(module, **where, **{"lmcache.mp.mp_transfer_mode": "engine_driven", **extra})


class Engine:
    """One engine on the server. `in_step`: loads have arrived with the step that begins them."""

    in_step = True

    def __init__(self, at: Server, connector: Mapping[str, Any]) -> None:
        self._at = at
        self.lab = Lab(num_blocks=BLOCKS, max_num_batched_tokens=256, connector=connector)
        self.kv = {f"layer.{index}": torch.zeros(BLOCKS, BLOCK, HEADS, SIZE) for index in range(LAYERS)}
        self.worker: Any = self._worker()
        self.worker.register_kv_caches(self.kv)
        self.local_at_load: list[int] = []
        """Tokens that the engine had itself, of each reload."""
        self.loaded = 0
        self._ended: set[str] = set()

    def _worker(self) -> Any:
        spec = self.lab.scheduler.kv_cache_config.kv_cache_groups[0].kv_cache_spec
        groups = [KVCacheGroupSpec(list(self.kv), spec)]
        layout = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
        return KVConnectorFactory.create_connector(self.lab.config, KVConnectorRole.WORKER, layout)

    def close(self) -> int:
        """End it once it has no lock left. Returns the locks that it kept all the same.

        Not before: LMCache handles UNREGISTER at once and FREE_LOOKUP_LOCKS in a thread, where it fails when it comes
        after the last engine of the model has gone (lmcache 0.5.6, engine_context.py: find_attn_desc raises).
        """
        locked = self._at.unlocked()
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
        self.worker.bind_connector_metadata(metadata)
        self.worker.handle_preemptions(metadata)
        self._load(metadata)
        for name, tokens in output.num_scheduled_tokens.items():
            self._compute(name, tokens, computed_before(output, name))
        self.worker.wait_for_save()
        sent, received = self.worker.get_finished(self._ended)
        self.worker.clear_connector_metadata()
        arrived = {name for name in received or () if self.lab.get(name) is not None}
        sent = {name for name in sent or () if self.lab.get(name) is not None} - arrived
        failed = self.worker.get_block_ids_with_load_errors()
        self.lab.update(output, finished_recving=arrived, finished_sending=sent, invalid_block_ids=failed)
        self._ended = {name for name in before if (kept := self.lab.get(name)) is not None and kept.is_finished()}

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
                tensor[blocks[position // BLOCK], position % BLOCK] = float(names[position] + layer)

    def _check(self, blocks: list[int], start: int, names: list[int], what: str) -> None:
        """The blocks hold the KV of these prefixes, from the one with index `start` on, in every byte."""
        for layer, tensor in enumerate(self.kv.values()):
            there = tensor[blocks].reshape(-1, HEADS * SIZE)[start : len(names)].long()
            wanted = torch.tensor(names[start:]).unsqueeze(1) + layer
            wrong = torch.nonzero((there != wanted).any(1)).flatten().tolist()
            assert not wrong, f"{what}: layer {layer} is not what was computed at {[start + at for at in wrong][:8]}"


def _names(tokens: list[int]) -> list[int]:
    """Name every prefix; small enough for a float32 to hold."""
    names, last = [], 0
    for token in tokens:
        last = (last * 31 + token + 1) % 1_000_003
        names.append(last)
    return names
