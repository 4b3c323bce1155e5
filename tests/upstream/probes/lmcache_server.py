"""A real LMCache MP server for a probe, on free ports of the loopback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

READY_WITHIN_SECONDS = 300.0


class Server:
    """`port`: of requests (ZMQ)."""

    def __init__(self, port: int, http_port: int) -> None:
        self.port = port
        self.http_port = http_port
        self._http = f"http://127.0.0.1:{http_port}"

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self._http + path, timeout=60) as answer:  # loopback
            return json.load(answer)

    def l1(self) -> dict[str, Any]:
        """Objects, memory and locks of the memory tier."""
        l1_manager: dict[str, Any] = self.get("/status")["storage_manager"]["l1_manager"]
        return l1_manager

    def until_stored(self, objects: int, within_seconds: float = 60.0) -> None:
        """Until so many can be found: a store is admitted after it has been reported as done."""
        deadline = time.monotonic() + within_seconds
        while (l1 := self.l1())["total_object_count"] - l1["staging_object_count"] < objects:
            assert time.monotonic() < deadline, l1
            time.sleep(0.02)

    def settled(self, key: str, value: int, within_seconds: float = 60.0) -> int:
        """The value of `key` in `l1`, once it is `value` or the time is over: releases are not acknowledged."""
        deadline = time.monotonic() + within_seconds
        while (now := int(self.l1()[key])) != value and time.monotonic() < deadline:
            time.sleep(0.02)
        return now


@contextmanager
def server(
    *, chunk: int = 64, l1_gb: float = 0.25, workers: int = 1, mode: str = "auto", more: Sequence[str] = ()
) -> Iterator[Server]:
    port, http_port = _free_ports()
    argv = ["--host", "127.0.0.1", "--port", str(port), "--http-host", "127.0.0.1", "--http-port", str(http_port)]
    argv += ["--l1-size-gb", str(l1_gb), "--no-l1-use-lazy", "--eviction-policy", "LRU", "--chunk-size", str(chunk)]
    argv += ["--max-workers", str(workers), "--supported-transfer-mode", mode, *more]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "lmcache.v1.multiprocess.http_server", *argv],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"},
        )
        try:
            yield _ready(process, Server(port, http_port), log)
        finally:
            process.terminate()
            process.wait(30)


def _ready(process: subprocess.Popen[bytes], started: Server, log: Any) -> Server:
    deadline = time.monotonic() + READY_WITHIN_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            started.get("/healthcheck")
            return started
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    log.seek(0)
    raise RuntimeError(f"the LMCache server did not get ready: {log.read()[-3000:].decode(errors='replace')}")


def _free_ports() -> list[int]:
    with socket.socket() as first, socket.socket() as other:
        first.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return [first.getsockname()[1], other.getsockname()[1]]
