"""A real engine (no model) and LMCache servers that die and come back: when is it registered again, and what is lost.

`python -m ... patched|upstream KILLS HEARTBEAT DOWN`: JSON, a list of what was seen of each kill. Kills take the
moments in turn. HEARTBEAT: seconds. DOWN: seconds between a kill and the start of the next server, ready 0.5 s later.
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
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pdserve.patches.lmcache import identity, registration
from tests.upstream.probes.lmcache_bytes import Engine
from tests.upstream.probes.lmcache_server import Server

MODULE = "lmcache.integration.vllm.lmcache_mp_connector"
CHUNK, PROMPT = 64, 256
GIVE_UP = 20.0


class Lives:
    """One server after the other on the same ports. The next one is always warm."""

    def __init__(self, patches: str) -> None:
        self.at = Server(*_quiet_ports())
        self._patches = patches
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the servers
        self._living: subprocess.Popen[bytes] | None = None
        self._next = self._warm()

    def _warm(self) -> subprocess.Popen[bytes]:
        argv = ["--host", "127.0.0.1", "--port", str(self.at.port), "--http-host", "127.0.0.1"]
        argv += ["--http-port", str(self.at.http_port), "--l1-size-gb", "0.25", "--no-l1-use-lazy"]
        argv += ["--eviction-policy", "LRU", "--chunk-size", str(CHUNK), "--supported-transfer-mode", "lmcache_driven"]
        return subprocess.Popen(
            [sys.executable, "-m", "tests.upstream.probes.lmcache_standby", *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "PDSERVE_PATCHES": self._patches, "LMCACHE_DISABLE_BANNER": "1"},
        )

    def begin(self) -> None:
        """Returns when it is ready."""
        self._living, going = self._next, self._next
        assert going.stdin is not None
        assert going.stdout is not None
        assert b"warm" in going.stdout.readline()
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
        drain(going)

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


def drain(process: subprocess.Popen[bytes]) -> None:
    """So that a server never waits for a reader of what it prints."""
    stdout = process.stdout
    assert stdout is not None
    threading.Thread(target=lambda: [None for _ in stdout], daemon=True).start()


class Asynchronous(Engine):
    """Loads arrive after the step that began them; what is attended to is checked when it is."""

    def _load(self, metadata: Any) -> None:
        self.worker.start_load_kv(None)
        self.loaded += sum(
            each.op.end - each.op.start - each.op.skip_first_n_tokens
            for each in metadata.requests
            if each.direction == "RETRIEVE"
        )


class Client:
    """An engine and its prompts, no two of which begin alike."""

    def __init__(self, lives: Lives, heartbeat: float) -> None:
        extra = {"lmcache.mp.mp_transfer_mode": "lmcache_driven", "lmcache.mp.heartbeat_interval": heartbeat}
        self.engine = Asynchronous(lives.at, MODULE, extra, mark=1)
        self.engine.worker.get_handshake_metadata()  # as EngineCore does once it is ready
        self.adapter = self.engine.worker.worker_adapter
        self._prompts = 0

    def prompt(self) -> list[int]:
        self._prompts += 1
        return list(range(self._prompts * 1000, self._prompts * 1000 + PROMPT))

    def add(self, tokens: list[int]) -> None:
        self.engine.lab.add(f"r{time.monotonic_ns()}", [*tokens, 5], max_tokens=2)

    def until(self, holds: Callable[[], bool], seconds: float = GIVE_UP) -> float | None:
        """Steps until it holds; after how many seconds, None: not in time."""
        began = time.monotonic()
        while not holds():
            if time.monotonic() - began > seconds:
                return None
            self.engine.step()
            time.sleep(0.002)
        return time.monotonic() - began

    def idle(self) -> bool:
        return not self.engine.lab.scheduler.requests

    def loads(self, tokens: list[int]) -> int:
        """Tokens of the prompt that come from the server, its bytes checked by the engine."""
        assert self.engine.lab.scheduler.reset_prefix_cache()
        before = self.engine.loaded
        self.add(tokens)
        assert self.until(self.idle) is not None
        return self.engine.loaded - before


def never_used(client: Client, lives: Lives) -> None:
    """No request has ever come."""


def idle(client: Client, lives: Lives) -> None:
    """It has stored."""
    client.add(client.prompt())
    assert client.until(client.idle) is not None


def during_a_store(client: Client, lives: Lives) -> None:
    client.add(client.prompt())
    with stopped_before(client, lives, "batched_submit_store_requests"):
        assert client.until(lambda: bool(client.adapter.store_futures)) is not None, "no store"


def during_a_retrieve(client: Client, lives: Lives) -> None:
    tokens = client.prompt()
    client.add(tokens)
    assert client.until(client.idle) is not None
    lives.at.until_stored(PROMPT // CHUNK)
    assert client.engine.lab.scheduler.reset_prefix_cache()
    client.add(tokens)
    with stopped_before(client, lives, "batched_submit_retrieve_requests"):
        assert client.until(lambda: bool(client.adapter.retrieve_futures)) is not None, "no retrieve"


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
    finished = client.until(client.idle, 5.0)
    result: dict[str, Any] = {"moment": moment.__name__, "registered": registered}
    result["finished"] = None if finished is None else round(finished, 2)
    if finished is None:
        return result
    # Healthy again: a moment after the registration is seen.
    client.until(lambda: client.adapter.is_healthy and client.engine.lab.connector.scheduler_adapter.is_healthy, wait)
    tokens = client.prompt()
    client.add(tokens)
    client.until(client.idle)
    with contextlib.suppress(AssertionError):
        lives.at.until_stored(PROMPT // CHUNK, 3.0)
    result["loaded"] = client.loads(tokens)
    return result


def kills(kind: str, count: int, heartbeat: float, down: float) -> Iterator[dict[str, Any]]:
    lives = Lives(identity.NAME if kind == "patched" else "")
    lives.begin()
    client: Client | None = None
    try:
        for number in range(count):
            moment = MOMENTS[number % len(MOMENTS)]
            if client is None or moment is never_used:
                if client is not None:
                    client.engine.close()
                client = Client(lives, heartbeat)
            result = seen(lives, client, moment, down, heartbeat + 4)
            yield result
            if result.get("finished") is None or result["registered"] is None:
                client = None
    finally:
        lives.close()


def main() -> None:
    kind, count, heartbeat, down = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
    if kind == "patched":
        registration.apply()
    results = []
    try:
        for each in kills(kind, count, heartbeat, down):
            results.append(each)
            print(each, file=sys.stderr, flush=True)
    finally:
        for segment in Path("/dev/shm").glob(f"lmcache_kv_{os.getpid()}_*"):
            segment.unlink()
    print(json.dumps(results), flush=True)
    os._exit(0)  # of an engine that lost its server nothing else ends


if __name__ == "__main__":
    main()
