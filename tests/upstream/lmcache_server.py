"""Real LMCache MP servers, one after another."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from tests.upstream.lmcache_engine import CHUNK
from tests.upstream.run import quiet_port

WITHIN_SECONDS = 60.0


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
        self.port, self.http_port = quiet_port(), quiet_port()
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
