"""A real engine (no model) and real LMCache servers, each of which is killed: the engine must be the next one's.

`python -m tests.upstream.test_lmcache_registration FLAGS`: an LMCache server that has imported everything and begins at
a line on stdin, in place of a restart that is faster than any real one. PDSERVE_PATCHES as for lmcache_server_main.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.patches.lmcache import registration
from tests.upstream.run import IN_RELEASE, INSTALLED_VLLM, on

if IN_RELEASE and __name__ != "__main__":
    from tests.upstream import lmcache_server
    from tests.upstream.lmcache_engine import CHUNK, THEIRS

PROMPT = 256
GIVE_UP = 20.0
HEARTBEAT_SECONDS = 4.0
MODULE = "tests.upstream.test_lmcache_registration"


class Lives:
    """One server after the other on the same ports. The next one is always warm."""

    def __init__(self, patches: str) -> None:
        self.at = lmcache_server.Server(*_quiet_ports())
        self._patches = patches
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the servers
        self._living: subprocess.Popen[bytes] | None = None
        self._next = self._warm()

    def _warm(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", MODULE, *self.at.argv(mode="lmcache_driven")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "PDSERVE_PATCHES": self._patches, "LMCACHE_DISABLE_BANNER": "1"},
        )

    def begin(self) -> None:
        """Returns when it is ready."""
        self._living, going = self._next, self._next
        assert going.stdin is not None
        stdout = going.stdout
        assert stdout is not None
        assert b"warm" in stdout.readline()
        going.stdin.write(b"\n")
        going.stdin.flush()
        while True:
            assert going.poll() is None, self.output()
            try:
                self.at.get("/healthcheck")
                break
            except (urllib.error.URLError, OSError):
                time.sleep(0.01)
        self._next = self._warm()
        # So that it never waits for a reader of what it prints.
        threading.Thread(target=lambda: [None for _ in stdout], daemon=True).start()

    def stop(self) -> None:
        """Returns when none of its threads runs any more."""
        assert self._living is not None
        self._living.send_signal(signal.SIGSTOP)
        os.waitpid(self._living.pid, os.WUNTRACED)

    def kill(self) -> None:
        assert self._living is not None
        self._living.kill()
        self._living.wait()

    def registered(self, instance: int) -> bool:
        return instance in self.at.get("/status")["registered_gpu_ids"]

    def output(self) -> str:
        self._log.seek(0)
        return self._log.read()[-3000:].decode(errors="replace")

    def close(self) -> None:
        for process in (self._living, self._next):
            if process is not None:
                process.kill()
                process.wait()


def _quiet_ports() -> list[int]:
    """Two that no connection gets as its own: a client that reconnects to a port of the ephemeral range meets itself
    there sooner or later, and the next server cannot bind it."""
    ports: list[int] = []
    while len(ports) < 2:
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port := random.randrange(20000, 30000)))
            ports.append(port)
    return ports


class Client:
    """An engine and its prompts, no two of which begin alike."""

    def __init__(self, lives: Lives, heartbeat: float) -> None:
        extra = {"lmcache.mp.mp_transfer_mode": "lmcache_driven", "lmcache.mp.heartbeat_interval": heartbeat}
        self.engine = lmcache_server.Engine(lives.at, lmcache_server.leaf(lives.at, THEIRS, **extra), mark=1)
        self.engine.in_step = False
        self.engine.worker.get_handshake_metadata()  # as EngineCore does once it is ready
        self.adapter = self.engine.worker.worker_adapter
        self._prompts = 0

    def prompt(self) -> list[int]:
        self._prompts += 1
        return list(range(self._prompts * 1000, self._prompts * 1000 + PROMPT))

    def add(self, tokens: list[int]) -> None:
        self.engine.lab.add(f"r{time.monotonic_ns()}", [*tokens, 5], max_tokens=2)

    def until(self, holds: Callable[[], bool], seconds: float = GIVE_UP) -> bool:
        """Steps until it holds. False: not in time."""
        began = time.monotonic()
        while not holds():
            if time.monotonic() - began > seconds:
                return False
            self.engine.step()
            time.sleep(0.002)
        return True

    def idle(self) -> bool:
        return not self.engine.lab.scheduler.requests

    def loads(self, tokens: list[int]) -> int:
        """Tokens of the prompt that come from the server, its bytes checked by the engine."""
        assert self.engine.lab.scheduler.reset_prefix_cache()
        before = self.engine.loaded
        self.add(tokens)
        assert self.until(self.idle)
        return self.engine.loaded - before


def never_used(client: Client, lives: Lives) -> None:
    """No request has ever come."""


def idle(client: Client, lives: Lives) -> None:
    """It has stored."""
    client.add(client.prompt())
    assert client.until(client.idle)


def during_a_store(client: Client, lives: Lives) -> None:
    client.add(client.prompt())
    with stopped_before(client, lives, "batched_submit_store_requests"):
        assert client.until(lambda: bool(client.adapter.store_futures)), "no store"


def during_a_retrieve(client: Client, lives: Lives) -> None:
    tokens = client.prompt()
    client.add(tokens)
    assert client.until(client.idle)
    lives.at.until_stored(PROMPT // CHUNK)
    assert client.engine.lab.scheduler.reset_prefix_cache()
    client.add(tokens)
    with stopped_before(client, lives, "batched_submit_retrieve_requests"):
        assert client.until(lambda: bool(client.adapter.retrieve_futures)), "no retrieve"


@contextlib.contextmanager
def stopped_before(client: Client, lives: Lives, method: str) -> Iterator[None]:
    """The server is stopped when the worker's adapter is asked for this: it never answers it."""
    submit = getattr(client.adapter, method)

    def stopped(*arguments: Any, **named: Any) -> Any:
        lives.stop()
        return submit(*arguments, **named)

    setattr(client.adapter, method, stopped)
    try:
        yield
    finally:
        delattr(client.adapter, method)


def during_a_lookup(client: Client, lives: Lives) -> None:
    lives.stop()
    client.add(client.prompt())
    client.engine.step()
    assert client.engine.lab.connector.scheduler_adapter._unacked_lookups, "no lookup"


MOMENTS = (never_used, idle, during_a_store, during_a_retrieve, during_a_lookup)


def seen(
    lives: Lives, client: Client, moment: Callable[[Client, Lives], None], down: float, wait: float
) -> dict[str, Any]:
    """Of one kill. `down`: seconds until the next server is started, ready 0.5 s later."""
    moment(client, lives)
    lives.kill()
    time.sleep(down)
    lives.begin()
    began = time.monotonic()
    registered = None
    while registered is None and time.monotonic() - began < wait:
        if not client.idle():
            client.engine.step()
        if lives.registered(client.adapter.instance_id):
            registered = round(time.monotonic() - began, 2)
        time.sleep(0.005)
    result: dict[str, Any] = {"moment": moment.__name__, "registered": registered, "loaded": 0}
    if result.setdefault("finished", client.until(client.idle, 5.0)):
        # Healthy again: a moment after the registration is seen.
        scheduler = client.engine.lab.connector.scheduler_adapter
        client.until(lambda: client.adapter.is_healthy and scheduler.is_healthy, wait)
        tokens = client.prompt()
        client.add(tokens)
        client.until(client.idle)
        with contextlib.suppress(AssertionError):
            lives.at.until_stored(PROMPT // CHUNK, 3.0)
        result["loaded"] = client.loads(tokens)
    return result


def kills(number: int, heartbeat: float, down: float, *, patched: bool = True) -> list[dict[str, Any]]:
    """Return what was seen of so many, which take the moments in turn."""
    if patched:
        registration.REGISTRATION.apply()
    lives = Lives(registration.IDENTITY_NAME if patched else "")
    results: list[dict[str, Any]] = []
    client: Client | None = None
    try:
        lives.begin()
        for moment in (MOMENTS * number)[:number]:
            if client is None or moment is never_used:
                if client is not None:
                    client.engine.close()
                client = Client(lives, heartbeat)
            results.append(result := seen(lives, client, moment, down, heartbeat + 4))
            if not result["finished"] or result["registered"] is None:
                client = None
    finally:
        lives.close()
        for segment in Path("/dev/shm").glob(f"lmcache_kv_{os.getpid()}_*"):
            segment.unlink()
    return results


@pytest.mark.full
@on(INSTALLED_VLLM)
def test_upstream_stays_unknown_to_a_server_that_is_back_before_it_was_missed() -> None:
    """What it stored is gone, in silence."""
    (life,) = kills(1, 2.0, 0.0, patched=False)
    assert (life["registered"], life["loaded"]) == (None, 0)


@on(INSTALLED_VLLM)
def test_with_the_patches_a_worker_is_registered_within_a_heartbeat_whatever_it_did() -> None:
    """And every request ends, and what is stored then is loaded again."""
    lives = kills(len(MOMENTS), HEARTBEAT_SECONDS, 0.0)
    assert [(life["finished"], life["loaded"]) for life in lives] == [(True, PROMPT)] * len(MOMENTS)
    assert [life for life in lives if life["registered"] is None or life["registered"] > HEARTBEAT_SECONDS + 2] == []


@pytest.mark.full
@on(INSTALLED_VLLM)
def test_and_by_a_server_that_is_back_after_several_heartbeats() -> None:
    lives = kills(2, 2.0, 6.0)
    assert [life for life in lives if life["registered"] is None or life["registered"] > 2.0 + 2] == []
    assert [life["loaded"] for life in lives] == [PROMPT] * 2


if __name__ == "__main__":
    import lmcache.v1.multiprocess.http_server  # noqa: F401

    from pdserve.patches import lmcache_server_main

    print("warm", flush=True)
    sys.stdin.readline()
    lmcache_server_main.main()
