"""Measures what a change of a serving deployment costs its clients: real engines, 2P2D, four clients.

    python -m benchmarks.changes changes   # ten changes: engines come, go, are replaced and restarted, a rolling proxy
    python -m benchmarks.changes kills --connector nixl --kills 10   # SIGKILL of API servers and EngineCores

Two clients stream, two do not; each sends the next request when the last one is answered. A request has failed when its
status is not 200, it has no text, or its connection broke; it was cut when its stream ended before `[DONE]`; it is
unequal when its text is not what the same prompt had before the first change (greedy, float32). Needs about 14 GB of
memory and the environment that scripts/setup makes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

REPOSITORY: Final = Path(__file__).resolve().parents[2]
NAME: Final = "changes"
PORTS: Final = {
    "proxy": 24000,
    "prefill": 24100,
    "decode": 24200,
    "bootstrap": 24300,
    "lmcache": 24400,
    "lmcache_http": 24500,
    "nixl": 24600,
}
PROMPTS: Final = 24
CLIENTS: Final = 4
TOKENS: Final = 12
STEADY_SECONDS: Final = 30.0


@dataclass
class Seen:
    """Counts what the clients saw in one phase."""

    waits: list[float] = field(default_factory=list)
    """Seconds to the first byte of text (of a plain request: to its answer)."""
    outcomes: Counter[str] = field(default_factory=Counter)
    why: Counter[str] = field(default_factory=Counter)

    def summary(self) -> dict[str, Any]:
        """Return the counts and the waits as one row."""
        waits = sorted(self.waits) or [0.0]
        return {
            "requests": sum(self.outcomes.values()),
            **{kind: self.outcomes[kind] for kind in ("failed", "cut", "unequal")},
            "p50_s": round(statistics.median(waits), 3),
            "p99_s": round(waits[min(len(waits) - 1, int(len(waits) * 0.99))], 3),
            "max_s": round(waits[-1], 3),
            "why": dict(self.why),
        }


class Load:
    """Four clients that never stop. `phase` gets what they see."""

    def __init__(self, url: str) -> None:
        """`url`: of the proxy."""
        self._url = f"{url}/v1/completions"
        self._expected: dict[int, str] = {}
        self.phase = Seen()

    async def run(self) -> None:
        """Send requests until cancelled."""
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=300, limits=limits) as client, asyncio.TaskGroup() as group:
            for index in range(CLIENTS):
                group.create_task(self._client(client, index))

    async def _client(self, client: httpx.AsyncClient, index: int) -> None:
        for turn in itertools.count(index):
            await self._request(client, turn * 7 % PROMPTS, stream=index % 2 == 0)

    async def _request(self, client: httpx.AsyncClient, prompt: int, *, stream: bool) -> None:
        words = " ".join(f"w{prompt}-{word}" for word in range(60))
        body = {"model": "tiny", "prompt": words, "max_tokens": TOKENS, "temperature": 0, "stream": stream}
        phase, began, first = self.phase, time.monotonic(), 0.0
        text, whole = "", not stream
        try:
            async with client.stream("POST", self._url, json=body) as answer:
                if answer.status_code != 200:
                    await answer.aread()
                    phase.outcomes["failed"] += 1
                    phase.why[f"{answer.status_code} {answer.text[:100]}"] += 1
                    return
                async for line in answer.aiter_lines():
                    first = first or time.monotonic() - began
                    event = line.removeprefix("data: ") if stream else line
                    if event == "[DONE]":
                        whole = True
                    elif event:
                        text += "".join(choice["text"] for choice in json.loads(event).get("choices", ()))
        except (httpx.HTTPError, ValueError) as error:
            phase.outcomes["cut" if first else "failed"] += 1
            phase.why[repr(error)[:100]] += 1
            return
        phase.waits.append(first)
        expected = self._expected.setdefault(prompt, text)
        outcome = "cut" if not whole else "failed" if not text else "unequal" if text != expected else "ok"
        phase.outcomes[outcome] += 1


class Deployment:
    """The 2P2D whose changes are measured."""

    def __init__(self, connector: str, home: Path) -> None:
        """`home`: where its record is."""
        self._home = home
        self._recipe = REPOSITORY / "recipes" / ("tiny-cpu-nixl.yaml" if connector == "nixl" else "tiny-cpu.yaml")
        self._set = [f"name={NAME}", *(f"ports.{name}={port}" for name, port in PORTS.items())]
        if connector == "nixl":
            self._set = [each for each in self._set if not each.startswith(("ports.bootstrap", "ports.lmcache"))]
        self.url = f"http://127.0.0.1:{PORTS['proxy']}"

    async def pdserve(self, *words: str, check: bool = True) -> str:
        """Run the command; return what it printed."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "pdserve.cli.main",
            *words,
            cwd=REPOSITORY,
            env={**os.environ, "PDSERVE_HOME": str(self._home)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        out, _ = await process.communicate()
        if check and process.returncode:
            raise SystemExit(f"pdserve {' '.join(words)}: exit {process.returncode}\n{out.decode()}")
        return out.decode()

    async def up(self, prefills: int, decodes: int, *more: str, **values: Any) -> str:
        """Bring it to so many instances; `values`: engine arguments."""
        roles = [f"prefill.instances={prefills}", f"decode.instances={decodes}"]
        args = [f"engine.args.{name.replace('_', '-')}={value}" for name, value in values.items()]
        setting = [word for each in (*self._set, *roles, *args) for word in ("--set", each)]
        return await self.pdserve("up", str(self._recipe), "--detach", *setting, *more)

    def state(self) -> dict[str, Any]:
        """Return the recorded state."""
        read: dict[str, Any] = json.loads((self._home / NAME / "current" / "state.json").read_text())
        return read

    async def until_ready(self) -> None:
        """Wait until every process serves."""
        while any(  # noqa: ASYNC110 (another process writes the file)
            process["phase"] not in ("ready", "done") for process in self.state()["processes"].values()
        ):
            await asyncio.sleep(0.1)

    def kill(self, name: str, *, core: bool) -> int:
        """SIGKILL the API server of an engine, or its EngineCore. Return the PID."""
        pid = int(self.state()["processes"][name]["id"]["pid"])
        if core:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            pid = next(int(child) for child in children if "EngineCore" in Path(f"/proc/{child}/comm").read_text())
        os.kill(pid, signal.SIGKILL)
        return pid


async def _changes(deployment: Deployment, load: Load) -> list[dict[str, Any]]:
    steps: list[tuple[str, Callable[[], Awaitable[str]]]] = [
        ("+1 decode", lambda: deployment.up(2, 3)),
        ("-1 decode", lambda: deployment.up(2, 2)),
        ("+1 prefill", lambda: deployment.up(3, 2)),
        ("-1 prefill", lambda: deployment.up(2, 2)),
        ("restart prefill-0", lambda: deployment.pdserve("restart", "prefill-0", "--deployment", NAME)),
        ("restart decode-1", lambda: deployment.pdserve("restart", "decode-1", "--deployment", NAME)),
        ("rolling proxy", lambda: deployment.pdserve("restart", "proxy", "--deployment", NAME)),
        ("--replace all", lambda: deployment.up(2, 2, "--replace", max_num_seqs=14)),
        ("restart prefill-1", lambda: deployment.pdserve("restart", "prefill-1", "--deployment", NAME)),
        ("restart decode-0", lambda: deployment.pdserve("restart", "decode-0", "--deployment", NAME)),
    ]
    rows = []
    for title, step in steps:
        load.phase, began = Seen(), time.monotonic()
        await step()
        rows.append({"step": title, "seconds": round(time.monotonic() - began, 1), **load.phase.summary()})
        print(json.dumps(rows[-1]), flush=True)
    return rows


async def _kills(deployment: Deployment, load: Load, kills: int) -> list[dict[str, Any]]:
    rows = []
    for index in range(kills):
        name, core = f"{('prefill', 'decode')[index % 2]}-{index // 4 % 2}", index // 2 % 2 == 1
        load.phase, began = Seen(), time.monotonic()
        deployment.kill(name, core=core)
        await asyncio.sleep(1)
        await deployment.until_ready()
        seconds, dying = round(time.monotonic() - began, 1), load.phase.summary()
        load.phase = Seen()
        await asyncio.sleep(3)
        after = load.phase.summary()
        rows.append({"step": f"kill {name} {'EngineCore' if core else 'API server'}", "seconds": seconds, **dying})
        rows[-1]["failed_after_ready"] = after["failed"] + after["cut"] + after["unequal"]
        print(json.dumps(rows[-1]), flush=True)
    return rows


async def _measure(what: str, connector: str, kills: int, instances: int, home: Path) -> dict[str, Any]:
    deployment = Deployment(connector, home)
    await deployment.up(instances, instances)
    try:
        load = Load(deployment.url)
        clients = asyncio.create_task(load.run())
        await asyncio.sleep(STEADY_SECONDS)
        load.phase = Seen()
        await asyncio.sleep(STEADY_SECONDS)
        steady = load.phase.summary()
        print(json.dumps({"step": "steady", **steady}), flush=True)
        rows = await (_changes(deployment, load) if what == "changes" else _kills(deployment, load, kills))
        clients.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await clients
    finally:
        await deployment.pdserve("down", NAME, check=False)
    totals = {kind: sum(row[kind] for row in rows) for kind in ("requests", "failed", "cut", "unequal")}
    return {"what": what, "connector": connector, "steady": steady, "steps": rows, "total": totals}


def main() -> None:
    """Measure, and print the result as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.changes", description=__doc__)
    parser.add_argument("what", choices=("changes", "kills"))
    parser.add_argument("--connector", choices=("mooncake", "nixl"), default="mooncake")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--instances", type=int, default=2, help="of each role at the start")
    parser.add_argument("--home", type=Path, default=REPOSITORY / ".cache" / "changes")
    options = parser.parse_args()
    result = asyncio.run(_measure(options.what, options.connector, options.kills, options.instances, options.home))
    print(json.dumps(result["total"]))


if __name__ == "__main__":
    main()
