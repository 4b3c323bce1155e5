"""python -m benchmarks.proxy.other_client: CPU a chunk with wrk as the client, which shares no code with ours.

What a chunk costs depends on how many of them a proxy finds when it reads, and that on who else has the machine. So the
streams are measured by a second client too: wrk (Debian: `wrk`), whose connections send one request after the other.
Needs the environment that scripts/bench-proxy makes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console

from benchmarks.proxy import wire
from benchmarks.proxy.connections import LoadError
from benchmarks.proxy.goals import OURS, REFERENCE
from benchmarks.proxy.meter import Meter
from benchmarks.proxy.systems import Cores, Mock, StartError, System, is_compiled, start

WARM, WINDOW = 1.2, 3.0
VISITS = 8


@dataclass(frozen=True)
class Shape:
    """So many streams at once; each has so many chunks, then the next begins."""

    streams: int
    per_second: int
    """Chunks of a stream."""
    chunks: int

    def __str__(self) -> str:
        return f"{self.streams} streams of {self.per_second}/s"


SHAPES = (Shape(512, 25, 50), Shape(64, 1000, 1600), Shape(512, 125, 200), Shape(512, 250, 400))


def script(requests: int = 32) -> str:
    """wrk's, in Lua: the bodies in turn. A JSON string is one of Lua if only quotes and backslashes are escaped."""
    bodies = ", ".join(json.dumps(wire.chat(512, seed, stream=True).decode()) for seed in range(requests))
    headers = f'{{["Content-Type"] = "application/json", ["Authorization"] = "Bearer {wire.API_KEY}"}}'
    return (
        f"local bodies = {{{bodies}}}\nlocal turn = 0\n"
        "request = function()\n"
        "  turn = turn % #bodies + 1\n"
        f'  return wrk.format("POST", "/v1/chat/completions", {headers}, bodies[turn])\n'
        "end\n"
    )


def refused(output: str) -> str | None:
    """What wrk says of answers that were not 200 or did not come; None: nothing."""
    return next((line.strip() for line in output.splitlines() if "Non-2xx" in line or "Socket errors" in line), None)


def microseconds_a_chunk(system: System, mock: Mock, shape: Shape, lua: Path) -> float:
    """LoadError: an answer was not 200."""
    assert system.pid is not None
    mock.configure({"interval": 1 / shape.per_second, "chunks": shape.chunks})
    url = f"http://{system.address.host}:{system.address.port}"
    seconds = str(round(WARM + WINDOW + 0.8))
    argv = ["wrk", "-t1", f"-c{shape.streams}", "-d", seconds, "--timeout", "30s", "-s", str(lua), url]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as client:
        time.sleep(WARM)
        meter = Meter(system.pid, (client.pid, mock.process.pid))
        before = mock.stats()["emitted"]
        meter.start()
        time.sleep(WINDOW)
        used = meter.stop()
        emitted = mock.stats()["emitted"] - before
        output = client.communicate()[0]
    why = refused(output)
    if why or not emitted:
        raise LoadError(f"{system.name}: {why or 'no chunk was sent'}")
    return float(used.cpu * 1e6 / emitted)


def compare(shape: Shape, systems: list[System], mock: Mock, lua: Path, log: Callable[[str], None]) -> None:
    """Both systems one after the other in each visit, in turning order."""
    figures: dict[str, list[float]] = {system.name: [] for system in systems}
    for visit in range(VISITS):
        for system in systems if visit % 2 else systems[::-1]:
            figures[system.name].append(microseconds_a_chunk(system, mock, shape, lua))
    ratios = sorted(ours / other for ours, other in zip(figures[OURS], figures[REFERENCE], strict=True))
    ours, other = median(figures[OURS]), median(figures[REFERENCE])
    spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
    log(f"{shape}: {median(ratios):.2f}x ({spread}); {OURS} {ours:.1f} us, {REFERENCE} {other:.1f} us")


def main() -> int:
    console = Console(highlight=False)
    if not shutil.which("wrk"):
        console.print("wrk is not installed (Debian: apt-get install wrk).", style="red")
        return 1
    cores = Cores.choose()
    os.sched_setaffinity(0, {cores.harness})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lua = folder / "requests.lua"
        lua.write_text(script())
        mock, systems = Mock.start(cores), []
        try:
            if not is_compiled():
                console.print("The installed pdserve is not compiled.", style="red")
            systems = [start(system, mock, cores, folder) for system in (REFERENCE, OURS)]
            for shape in SHAPES:
                compare(shape, systems, mock, lua, lambda line: console.print(line, soft_wrap=True))
        except (StartError, LoadError) as error:
            console.print(str(error), style="red", markup=False)
            return 1
        finally:
            for running in systems:
                running.stop()
            mock.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
