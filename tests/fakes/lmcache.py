"""A scriptable stand-in for LMCache's MP server: its argv, its two ports, its HTTP API, and every way to fail.

    python tests/fakes/lmcache.py --port 5555 --http-port 8080 --l1-size-gb 1 --instance-id ID --host H --http-host H
        (other flags are taken and ignored)

It ends by SIGTERM (uvicorn raises it again) after a clean stop, and with 3 where a port is taken, as lmcache 0.5.6.
Faults are scripted by environment: FAKE_LMCACHE_READY_AFTER and so on, one for each field of Script; recipes pass them
through `lmcache.env`, because the server's environment is an allow-list. `POST /fake/script {"registered": 0}` changes
the fields marked * while it runs. With `GET /fake/use?salt=S&chunks=A,B` a fake engine loads and stores the chunks of a
prompt (Server._use has the rest), with `GET /fake/forget` it resets what is stored; `?salt=END`: only what has a salt
that ends so. `POST /cache/clear` forgets what no lock holds. It outlives whoever started it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

# Started by path, from any folder: the repository, not this folder, is where modules come from.
sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.fakes.engine_script import Faults, die  # noqa: E402
from tests.fakes.microhttp import Request, Responder, serve  # noqa: E402

_CHUNK_BYTES = 1024


@dataclass
class Script(Faults):
    """Faults and delays, each from FAKE_LMCACHE_<NAME>."""

    PREFIX = "FAKE_LMCACHE_"
    ready_after: float = 0.0
    """Seconds until it listens."""
    hang: bool = False
    """Lives, and never listens."""
    die_at: str = ""
    """start: when its ports are bound."""
    registered: int = 16
    """* Any engine counts as attached by default: the fake engines do not register."""
    objects: int = 0
    """* Objects in L1."""
    locked: int = 0
    """* Chunks that loads hold: their locks have leaked."""
    bytes: int = 0
    """* Bytes in L1."""
    loses: bool = False
    """* What engines store is gone at once."""
    unhealthy: bool = False
    """* /healthcheck answers 503."""
    leaks: int = 0
    """Of what is stored, so many chunks stay locked."""


class Server:
    """One fake server: what its HTTP API answers."""

    def __init__(self, flags: argparse.Namespace, script: Script) -> None:
        self.flags = flags
        self.script = script
        self.stopping = asyncio.Event()
        self.salts: dict[str, dict[str, int]] = {}
        self.chunks: set[tuple[str, str]] = set()
        """By salt and by a hash of all tokens up to their end."""

    async def handle(self, request: Request, responder: Responder) -> None:
        """All routes of the HTTP API that pdserve uses, and the fake's own under /fake."""
        script = self.script
        match request.method, request.path:
            case "GET", "/healthcheck":
                if script.unhealthy:
                    await responder.send(503, {"status": "unhealthy", "reason": "engine not initialized"})
                else:
                    await responder.send(200, {"status": "healthy"})
            case "GET", "/config":
                # Indented, as the real one answers.
                await responder.send(200, json.dumps({"mp": {"instance_id": self.flags.instance_id}}, indent=2))
            case "GET", "/status":
                await responder.send(200, self._status())
            case "GET", "/metrics":
                await responder.send(200, self._metrics(), content_type="text/plain; version=0.0.4")
            case "POST", "/cache/clear":
                script.objects, script.bytes = max(script.locked, min(script.leaks, script.objects)), 0
                self.chunks.clear()
                await responder.send(200, {"status": "ok"})
            case "POST", "/fake/script":
                for name, value in json.loads(request.body).items():
                    script.set(name, value)
                await responder.send(200, {})
            case "GET", "/fake/use":
                await responder.send(200, self._use(request.query))
            case "GET", "/fake/forget":
                self.chunks = {chunk for chunk in self.chunks if not chunk[0].endswith(request.query.get("salt", ""))}
                await responder.send(200, {})
            case _:
                await responder.send(404, {"detail": "Not Found"})

    def _use(self, query: dict[str, str]) -> dict[str, int]:
        """A prompt that an engine computes: the first `longest` of its chunks may be loaded, but for the `local` ones
        that the engine has; all are stored, unless `store` is 0. Answers how many were known, and how many are new."""
        if self.script.loses:
            return {"known": 0, "written": 0}
        salt = query.get("salt", "")
        chunks = [(salt, name) for name in query.get("chunks", "").split(",") if name]
        known = list(takewhile(self.chunks.__contains__, chunks[: int(query["longest"])]))
        new = set(chunks) - self.chunks if query["store"] == "1" else set()
        self.chunks |= new
        counts = self.salts.setdefault(salt, {"write": 0, "read": 0})
        counts["write"] += len(new)
        counts["read"] += max(0, len(known) - int(query["local"]))
        self.script.objects += len(new)
        self.script.bytes += len(new) * _CHUNK_BYTES
        return {"known": len(known), "written": len(new)}

    def _status(self) -> dict[str, Any]:
        l1 = {
            "total_object_count": self.script.objects,
            "read_locked_count": self.script.locked,
            "memory_used_bytes": self.script.bytes,
            "memory_total_bytes": int(self.flags.l1_size_gb * (1 << 30)),
        }
        return {
            "is_healthy": True,
            "storage_manager": {"l1_manager": l1},
            "registered_non_cuda_instance_ids": list(range(self.script.registered)),
        }

    def _metrics(self) -> str:
        total = self.flags.l1_size_gb * (1 << 30)
        labels = '{backend="dram",l1_tag="_default"}'
        return (
            "# TYPE lmcache_mp_l1_memory_usage_bytes gauge\n"
            f"lmcache_mp_l1_memory_usage_bytes{labels} {float(self.script.bytes)}\n"
            "# TYPE lmcache_mp_l1_usage_ratio gauge\n"
            f"lmcache_mp_l1_usage_ratio{labels} {self.script.bytes / total}\n"
        ) + "".join(
            f'lmcache_mp_l1_{what}_chunks_total{{cache_salt="{salt}",l1_tag="_default"}} {float(count)}\n'
            for salt, counts in self.salts.items()
            for what, count in counts.items()
        )


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="http_server.py")
    parser.add_argument("--instance-id", default="fake")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=5555)
    parser.add_argument("--http-host", default="127.0.0.1")
    parser.add_argument("--http-port", type=int, default=8080)
    parser.add_argument("--l1-size-gb", type=float, required=True)
    return parser.parse_known_args(arguments)[0]


def fail(*lines: str) -> NoReturn:
    """Crash in the start-up, without a cleanup."""
    print(*lines, sep="\n", file=sys.stderr, flush=True)
    os._exit(3)


def stop() -> NoReturn:
    """Ends as the signal that stopped it ends a process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.raise_signal(signal.SIGTERM)
    raise AssertionError("SIGTERM did not end the process")


def log(text: str) -> None:
    """A log line in the real server's shape."""
    print(f"[2026-01-01 00:00:00,000] LMCache INFO: {text} (fake.py:1:fake)", file=sys.stderr, flush=True)


def bind_request_socket(host: str, port: int) -> socket.socket:
    """ZeroMQ's port: accepts connections and says nothing."""
    request = socket.socket()
    request.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        request.bind((host, port))
    except OSError as error:
        what = os.strerror(error.errno or 0)
        fail(
            f"zmq.error.ZMQError: {what} (addr='tcp://{host}:{port}')",
            "",
            "ERROR:    Application startup failed. Exiting.",
        )
    request.listen()
    return request


async def run(flags: argparse.Namespace, script: Script) -> None:
    """Lives until it is told to stop; raises nothing."""
    server = Server(flags, script)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, server.stopping.set)
    log(f"Starting LMCache HTTP server on http://{flags.http_host}:{flags.http_port}")
    if script.hang:
        await server.stopping.wait()
        stop()
    if script.ready_after:
        # Stopped while it starts: it must not sleep on.
        _done, late = await asyncio.wait([asyncio.ensure_future(server.stopping.wait())], timeout=script.ready_after)
        if not late:
            stop()
    request = bind_request_socket(flags.host, flags.port)
    log(f"LMCache zmq cache server is running on {flags.host}:{flags.port}")
    log("LMCache cache server is running...")
    if script.die_at == "start":
        die(script, "RuntimeError: the fake was told to die")
    try:
        http = await serve(flags.http_host, flags.http_port, server.handle)
    except OSError as error:
        address = f"('{flags.http_host}', {flags.http_port})"
        fail(f"ERROR:    [Errno {error.errno}] error while attempting to bind on address {address}: {error.strerror}")
    print("INFO:     Application startup complete.", file=sys.stderr)
    print(f"INFO:     Uvicorn running on http://{flags.http_host}:{flags.http_port}", file=sys.stderr, flush=True)
    await server.stopping.wait()
    log("LMCache HTTP server stopped")
    http.close()
    request.close()
    stop()


def main() -> None:
    script = Script.from_env()
    flags = parse(sys.argv[1:])
    asyncio.run(run(flags, script))


if __name__ == "__main__":
    main()
