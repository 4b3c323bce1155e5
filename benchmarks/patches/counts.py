"""Exact figures of a step: the interpreter's bytecodes, and the machine's instructions where valgrind is installed.

`python -m benchmarks.patches.counts`, run by callgrind: reads an order on stdin and writes counts.json to the working
folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.patches import callgrind
from benchmarks.patches.process import Side, prepare

STEPS = 4
"""Even of a few, a count changes by a thousandth at most from run to run."""

Cell = tuple[str, tuple[str, ...]]
"""Scenario and patches."""


def bytecodes(cells: Collection[Cell], steps: int) -> dict[Cell, int]:
    return dict(_counted("bytecodes", cells, steps))


def instructions(cells: Collection[Cell]) -> dict[Cell, int] | None:
    """Takes minutes: vLLM is imported by an emulated CPU. None without valgrind."""
    if not callgrind.available():
        return None
    with tempfile.TemporaryDirectory() as name:
        command, environment = callgrind.command([sys.executable, "-m", __name__], Path(name))
        subprocess.run(
            command,
            cwd=name,
            env=environment,
            input=json.dumps(list(cells)),
            text=True,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        return _cells(json.loads((Path(name) / "counts.json").read_text()))


def _counted(kind: str, cells: Collection[Cell], steps: int) -> Iterator[tuple[Cell, int]]:
    """Of one step. As many at once as there are CPUs: a count does not change with what runs beside it."""
    left = sorted(cells)
    while left:
        now, left = left[: os.cpu_count() or 1], left[os.cpu_count() or 1 :]
        with ExitStack() as stack:
            sides = []
            for scenario, patches in now:
                side = Side(patches, scenario, layout=None)
                stack.callback(side.close)
                side.order(kind, steps)
                sides.append(side)
            for cell, side in zip(now, sides, strict=True):
                yield cell, side.answer() // steps


def _cells(rows: Sequence[tuple[tuple[str, list[str]], int]]) -> dict[Cell, int]:
    return {(scenario, tuple(patches)): count for (scenario, patches), count in rows}


def _rows(counts: Mapping[Cell, int]) -> list[tuple[Cell, int]]:
    return list(counts.items())


def main() -> None:
    cells = [(scenario, tuple(patches)) for scenario, patches in json.load(sys.stdin)]
    prepare()
    counts = _rows(dict(_counted("instructions", cells, STEPS)))
    Path("counts.json").write_text(json.dumps(counts))


if __name__ == "__main__":
    main()
