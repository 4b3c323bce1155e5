"""The figures as a table; the README's is made from results.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.patches.figures import ALL, CONTROL, LIMIT, Figure
from benchmarks.patches.interval import CONFIDENCE

HERE = Path(__file__).parent.resolve()
BEGIN, END = "<!-- made from results.json -->", "<!-- end -->"


def table(figures: Sequence[Figure]) -> list[str]:
    """In the order of the scenarios; within one, as measured."""
    lines = [
        f"| scenario | patches | step us | unpatched us | CPU | {CONFIDENCE:.0%} interval | rounds | instructions "
        "| bytecodes |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for figure in figures:
        name = f"**{figure.system}**" if figure.system in (ALL, CONTROL) else figure.system
        lines.append(
            f"| {figure.scenario} | {name} | {figure.step_us:.0f} | {figure.unpatched_us:.0f} | {_more(figure.ratio)} "
            f"| {_more(figure.low)} to {_more(figure.high)} | {figure.rounds} | {_more(figure.instructions)} "
            f"| {_more(figure.bytecodes)} |"
        )
    return lines


def judged(figures: Sequence[Figure]) -> list[str]:
    """By the interval of the CPU's time alone: instructions are no time. One line for each patch that does not pass."""
    single = [figure for figure in figures if figure.system not in (ALL, CONTROL)]
    lines = [
        f"{'not decided' if figure.verdict is None else 'FAIL'}: {figure.system} costs {_more(figure.low)} to "
        f"{_more(figure.high)} of a step in {figure.scenario} (limit {LIMIT - 1:.0%}), "
        f"{_more(figure.instructions) or 'unknown'} by instructions"
        for figure in single
        if not figure.verdict
    ]
    passed = sum(figure.verdict is True for figure in single)
    return [*lines, f"pass: {passed} of {len(single)} costs of single patches are below {LIMIT - 1:.0%} of a step"]


def _more(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio - 1:+.1%}"


def write(results: dict[str, Any], figures: Sequence[Figure], folder: Path) -> None:
    """results.json; beside this file the README's table too."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    if folder.resolve() == HERE:
        readme = HERE / "README.md"
        before, _, rest = readme.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        lines = [BEGIN, "", *table(figures), "", *(f"- {line}" for line in judged(figures)), "", END]
        readme.write_text(before + "\n".join(lines) + after)
