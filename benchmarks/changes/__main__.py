"""Measures what a change of a serving deployment costs its clients: real engines, 2P2D, four clients.

    python -m benchmarks.changes changes   # ten changes: engines come, go, are replaced and restarted, a rolling proxy
    python -m benchmarks.changes kills --connector nixl --times 10   # SIGKILL of API servers and EngineCores
    python -m benchmarks.changes interruptions --times 50   # changes that Ctrl-C, a death, or the launcher's death ends

Two clients stream, two do not; each sends the next request when the last one is answered. A request has failed when its
status is not 200, it has no text, or its connection broke; it was cut when its stream ended before `[DONE]`; it is
unequal when its text is not what the same prompt had before the first change (greedy, float32). After an interruption
each process must be what one of both plans says, by the record and by its own command line; `status` must say which;
and `up` must go on to the new plan. Needs about 14 GB of memory and the environment that scripts/setup makes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
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
    """Four clients that never stop, and what they see."""

    def __init__(self, url: str) -> None:
        """`url`: of the proxy."""
        self._url = f"{url}/v1/completions"
        self._expected: dict[int, str] = {}
        self.phases = [Seen()]

    @property
    def phase(self) -> Seen:
        """Return the counts of requests that begin now; one that waits counts where it began."""
        return self.phases[-1]

    def begin_phase(self) -> Seen:
        """Count what begins from now on apart."""
        self.phases.append(Seen())
        return self.phase

    def total(self) -> dict[str, int]:
        """Return the counts of all phases."""
        counts = sum((seen.outcomes for seen in self.phases), Counter[str]())
        return {"requests": counts.total(), **{kind: counts[kind] for kind in ("failed", "cut", "unequal")}}

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

    async def begin(self, *words: str) -> asyncio.subprocess.Process:
        """Begin the command."""
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "pdserve.cli.main",
            *words,
            cwd=REPOSITORY,
            env={**os.environ, "PDSERVE_HOME": str(self._home)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )

    async def pdserve(self, *words: str, check: bool = True) -> str:
        """Run the command; return what it printed."""
        process = await self.begin(*words)
        out, _ = await process.communicate()
        if check and process.returncode:
            raise SystemExit(f"pdserve {' '.join(words)}: exit {process.returncode}\n{out.decode()}")
        return out.decode()

    def words(self, prefills: int, decodes: int, *more: str, **values: Any) -> list[str]:
        """Return the `up` that brings it to so many instances; `values`: engine arguments."""
        roles = [f"prefill.instances={prefills}", f"decode.instances={decodes}"]
        args = [f"engine.args.{name.replace('_', '-')}={value}" for name, value in values.items()]
        setting = [word for each in (*self._set, *roles, *args) for word in ("--set", each)]
        return ["up", str(self._recipe), "--detach", *setting, *more]

    async def up(self, prefills: int, decodes: int, *more: str, **values: Any) -> str:
        """Bring it to so many instances; `values`: engine arguments."""
        return await self.pdserve(*self.words(prefills, decodes, *more, **values))

    def plan(self) -> dict[str, Any]:
        """Return what the recorded plan says of each process, but for what the proxy is told while it runs."""
        run = (self._home / NAME / "current").resolve()
        read = json.loads((run / "plan.json").read_text().replace(run.name, "RUN"))
        return {each["name"]: {**each, "files": {}} for each in read["processes"]}

    def argv(self, name: str) -> list[str]:
        """Return the command line that a process really has; empty: it does not run."""
        process = self.state()["processes"].get(name) or {}
        try:
            line = Path(f"/proc/{process['id']['pid']}/cmdline").read_bytes()
        except (KeyError, TypeError, OSError):
            return []
        run = (self._home / NAME / "current").resolve()
        return line.decode().replace(run.name, "RUN").split("\0")[:-1]

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
            pid = next(int(child) for child in children if "EngineCor" in Path(f"/proc/{child}/comm").read_text())
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
        load.begin_phase()
        began = time.monotonic()
        await step()
        rows.append({"step": title, "seconds": round(time.monotonic() - began, 1), **load.phase.summary()})
        print(json.dumps(rows[-1]), flush=True)
    return rows


async def _kills(deployment: Deployment, load: Load, kills: int) -> list[dict[str, Any]]:
    rows = []
    for index in range(kills):
        name, core = f"{('prefill', 'decode')[index % 2]}-{index // 4 % 2}", index // 2 % 2 == 1
        dying, began = load.begin_phase(), time.monotonic()
        restarts = deployment.state()["processes"][name]["restarts"]
        deployment.kill(name, core=core)
        while deployment.state()["processes"][name]["restarts"] == restarts:  # noqa: ASYNC110 (as above)
            await asyncio.sleep(0.1)
        await deployment.until_ready()
        seconds = round(time.monotonic() - began, 1)
        after = load.begin_phase()
        await asyncio.sleep(5)  # in which what waited for the engine is answered, and counts as it was asked
        rows.append({"step": f"kill {name} {'EngineCore' if core else 'API server'}", "seconds": seconds})
        rows[-1].update(dying.summary())
        rows[-1]["failed_after_ready"] = after.outcomes.total() - after.outcomes["ok"]
        print(json.dumps(rows[-1]), flush=True)
    return rows


@dataclass(frozen=True)
class Target:
    """Describes what the deployment is changed to."""

    prefills: int = 2
    decodes: int = 2
    sequences: int = 16

    def words(self, deployment: Deployment) -> list[str]:
        """Return the `up` that brings it about."""
        return deployment.words(self.prefills, self.decodes, "--replace", max_num_seqs=self.sequences)


async def _interruptions(deployment: Deployment, load: Load, times: int, seed: int) -> list[dict[str, Any]]:
    rows, draw, now = [], random.Random(seed), Target()  # noqa: S311 (when to interrupt)
    await deployment.pdserve(*now.words(deployment))
    for index in range(times):
        base = Target(sequences=now.sequences)
        if now != base:
            target, patience = base, 3.0
        elif draw.random() < 0.2:
            target, patience = Target(sequences=30 - now.sequences), 80.0
        else:
            target, patience = draw.choice((Target(3, 2, now.sequences), Target(2, 3, now.sequences))), 45.0
        how = ("Ctrl-C", "a death", "the launcher's death", "a death")[index % 4]
        rows.append(await _interrupt(deployment, load, now, target, how, draw.uniform(0.2, patience), draw))
        print(json.dumps(rows[-1]), flush=True)
        now = target
    return rows


async def _interrupt(
    deployment: Deployment, load: Load, now: Target, target: Target, how: str, delay: float, draw: random.Random
) -> dict[str, Any]:
    load.begin_phase()
    began, old = time.monotonic(), deployment.plan()
    command = await deployment.begin(*target.words(deployment))
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(command.wait(), delay)
    finished, killed = command.returncode is not None, ""
    if how == "Ctrl-C" and not finished:
        command.send_signal(signal.SIGINT)
    elif how == "a death":
        engines = [name for name, each in deployment.state()["processes"].items() if each["phase"] == "ready"]
        killed = draw.choice([name for name in engines if name.startswith(("prefill", "decode"))])
        deployment.kill(killed, core=False)
    elif how == "the launcher's death":
        os.kill(int(deployment.state()["launcher"]["pid"]), signal.SIGKILL)
    out, _ = await asyncio.wait_for(command.communicate(), 300)
    status = json.loads(await deployment.pdserve("status", NAME, "--json", check=False))
    between, running = deployment.plan(), {name: deployment.argv(name) for name in old}
    again = await deployment.begin(*target.words(deployment))
    said, _ = await again.communicate()
    ends = [again.returncode]
    if again.returncode:  # a death that this change met again, or that waits for its back-off
        again = await deployment.begin(*target.words(deployment))
        said, _ = await again.communicate()
        ends.append(again.returncode)
    if again.returncode:
        print(out.decode(), said.decode(), json.dumps(status), sep="\n", file=sys.stderr, flush=True)
    await asyncio.wait_for(deployment.until_ready(), 300)
    new = deployment.plan()
    names = {*old, *new, *between}
    unplanned = [name for name in names if between.get(name) not in (old.get(name), new.get(name))]
    unplanned += [name for name, argv in running.items() if argv and not _is_of(argv, old.get(name), new.get(name))]
    changed = {name for name in names if old.get(name) != new.get(name)}
    left = sorted(name for name in changed if between.get(name) != new.get(name))
    return {
        "step": f"{how} {'(after its end) ' if finished else ''}{killed}".strip(),
        "change": f"{now} -> {target}".replace("Target", ""),
        "after_s": round(delay, 1),
        "exit": command.returncode,
        "phase": status.get("phase"),
        "says": status.get("change"),
        "left": left,
        "unplanned": unplanned,
        "up": ends,
        "seconds": round(time.monotonic() - began, 1),
        **load.phase.summary(),
    }


def _is_of(argv: list[str], *planned: dict[str, Any] | None) -> bool:
    """Return whether a process runs by one of these plans: its command line ends as the planned one does."""
    return any(each is not None and argv[-len(each["argv"]) + 1 :] == each["argv"][1:] for each in planned)


async def _measure(options: argparse.Namespace) -> dict[str, Any]:
    deployment = Deployment(options.connector, options.home)
    await deployment.up(options.instances, options.instances)
    try:
        load = Load(deployment.url)
        clients = asyncio.create_task(load.run())
        await asyncio.sleep(STEADY_SECONDS)
        load.begin_phase()
        await asyncio.sleep(STEADY_SECONDS)
        steady = load.phase.summary()
        print(json.dumps({"step": "steady", **steady}), flush=True)
        if options.what == "changes":
            rows = await _changes(deployment, load)
        elif options.what == "kills":
            rows = await _kills(deployment, load, options.times)
        else:
            rows = await _interruptions(deployment, load, options.times, options.seed)
        clients.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await clients
    finally:
        await deployment.pdserve("down", NAME, check=False)
    return {"steady": steady, "steps": rows, "total": load.total()}


def main() -> None:
    """Measure, and print the result as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.changes", description=__doc__)
    parser.add_argument("what", choices=("changes", "kills", "interruptions"))
    parser.add_argument("--connector", choices=("mooncake", "nixl"), default="mooncake")
    parser.add_argument("--times", type=int, default=20, help="kills, or interruptions")
    parser.add_argument("--seed", type=int, default=35, help="of the moments of interruptions")
    parser.add_argument("--instances", type=int, default=2, help="of each role at the start")
    parser.add_argument("--home", type=Path, default=REPOSITORY / ".cache" / "changes")
    options = parser.parse_args()
    print(json.dumps(asyncio.run(_measure(options))["total"]))


if __name__ == "__main__":
    main()
