"""A stand-in for mooncake_master: its two ports, its /health, and a clean end at TERM.

    python tests/fakes/mooncake_master.py -rpc_address=A -rpc_port=P -metrics_host=H -metrics_port=Q

As mooncake 0.3.13: flags of gflags with one dash, an unknown one ends it with code 1.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

# Started by path, from any folder: the repository, not this folder, is where modules come from.
sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.fakes.microhttp import Request, Responder, serve  # noqa: E402

_KNOWN = {
    "rpc_address",
    "rpc_port",
    "metrics_host",
    "metrics_port",
    "enable_metric_reporting",
    "eviction_ratio",
}
_HEALTH = '{"status":"ok","role":"leader","ha_state":"serving","service_ready":true}'


async def _handle(request: Request, responder: Responder) -> None:
    if request.path == "/health":
        await responder.send(200, _HEALTH)
    elif request.path == "/metrics":
        await responder.send(200, "# TYPE master_total_capacity_bytes gauge\nmaster_total_capacity_bytes 1048576\n")
    else:
        await responder.send(404, "")


async def _run(flags: dict[str, str]) -> None:
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    servers = [
        await serve(flags["rpc_address"], int(flags["rpc_port"]), _handle),
        await serve(flags["metrics_host"], int(flags["metrics_port"]), _handle),
    ]
    await stopping.wait()
    for server in servers:
        server.close()


def main() -> None:
    flags = dict(word.removeprefix("-").split("=", 1) for word in sys.argv[1:])
    if unknown := sorted(flags.keys() - _KNOWN):
        sys.exit(f"ERROR: unknown command line flag '{unknown[0]}'")
    asyncio.run(_run(flags))


if __name__ == "__main__":
    main()
