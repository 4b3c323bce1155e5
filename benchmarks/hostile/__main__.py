"""Loads a running deployment with one good client and one that is not, and says what the good one got.

    pdserve up recipes/tiny-cpu.yaml --detach
    python -m benchmarks.hostile rejected --seconds 600      # what engines reject, in bursts and all the time
    python -m benchmarks.hostile crashing --seconds 600      # what engines answer with 500, 60 a second

Exits with 1 when a request of the good client failed. The deployment must be on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Coroutine, Mapping
from typing import Any

import httpx

from benchmarks.hostile import clients
from benchmarks.hostile.clients import Hostile, Innocent
from benchmarks.hostile.watch import Look, Watch

_AFTER_SECONDS = 3.0
"""After the end, before the last look: what is released within a second is released by then."""


def _status(name: str) -> dict[str, Any]:
    argv = [sys.executable, "-m", "pdserve.cli.main", "status", "--json", *([name] if name else [])]
    output = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    return dict(json.loads(output))


def _rejected(client: httpx.AsyncClient, model: str, end: float, got: Hostile) -> list[Coroutine[Any, Any, None]]:
    return [
        clients.at_a_rate(client, "too long", clients.too_long(model), 12, end, got),
        clients.at_a_rate(client, "refused by decode", clients.refused_by_decode(model), 1, end, got),
        clients.in_bursts(client, "burst: too long", clients.too_long(model), 440, 60, end, got),
        clients.in_bursts(client, "burst: no message", clients.no_message(model), 540, 60, end, got),
        clients.in_bursts(client, "burst: wrong model", clients.wrong_model(model), 800, 60, end, got),
    ]


def _crashing(client: httpx.AsyncClient, model: str, end: float, got: Hostile) -> list[Coroutine[Any, Any, None]]:
    return [clients.at_a_rate(client, "poison", clients.poison(model), 60, end, got)]


_LOADS = {"rejected": (_rejected, 5.0), "crashing": (_crashing, 10.0)}
"""What is sent, and good requests a second beside it."""


async def _run(load: str, seconds: float, every: float, status: Mapping[str, Any], model: str) -> int:
    hostile_load, rate = _LOADS[load]
    processes: Mapping[str, Mapping[str, Any]] = status["processes"]
    engines = {
        name: f"http://127.0.0.1:{process['ports']['http']}"
        for name, process in processes.items()
        if process["role"] in ("prefill", "decode", "aggregated")
    }
    watch = Watch({name: process["pid"] for name, process in processes.items()}, engines)
    good, bad = Innocent(), Hostile()
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=status["endpoint"], trust_env=False, limits=limits) as first,
        httpx.AsyncClient(base_url=status["endpoint"], trust_env=False, limits=limits) as other,
        httpx.AsyncClient(trust_env=False) as looker,
    ):
        end = time.monotonic() + seconds
        await asyncio.gather(
            clients.innocent(first, clients.good(model), rate, end, good),
            watch.until(looker, end, every),
            *hostile_load(other, model, end, bad),
        )
        await asyncio.sleep(_AFTER_SECONDS)
        await watch.look(looker)
    _print_summary(good, bad, watch.looks)
    return 1 if good.failures or good.good != good.sent else 0


def _print_summary(good: Innocent, bad: Hostile, looks: list[Look]) -> None:
    times = sorted(good.seconds) or [0.0]
    p50, p99 = times[len(times) // 2], times[len(times) * 99 // 100]
    print(f"good client: {good.good} of {good.sent} answered, p50 {p50:.2f} s, p99 {p99:.2f} s", dict(good.failures))
    for (kind, answer), count in sorted(bad.answers.items()):
        print(f"other client: {kind}: {count} x {answer}")
    names = list(looks[0].descriptors)
    print("| seconds | " + " | ".join(f"{name}: files, MiB, KV" for name in names) + " |")
    print("| ---: |" + " ---: |" * len(names))
    for look in looks:
        cells = [_cell(look, name) for name in names]
        print(f"| {look.seconds:.0f} | " + " | ".join(cells) + " |")


def _cell(look: Look, name: str) -> str:
    kv = f", {look.kv[name]:.1%}" if name in look.kv else ""
    return f"{look.descriptors[name]}, {look.memory[name]}{kv}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hostile", description=__doc__)
    parser.add_argument("load", choices=sorted(_LOADS))
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--every", type=float, default=60, help="seconds between two looks at the processes")
    parser.add_argument("--name", default="", help="of the deployment, if there are several")
    parser.add_argument("--model", default="tiny")
    args = parser.parse_args()
    return asyncio.run(_run(args.load, args.seconds, args.every, _status(args.name), args.model))


if __name__ == "__main__":
    sys.exit(main())
