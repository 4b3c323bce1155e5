"""The figures as a table; the README's is made from results.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.patches.measure import ALL, CONTROL, Figure

LIMIT = 1.03
"""What a patch may cost of a step."""
HERE = Path(__file__).parent.resolve()
BEGIN, END = "<!-- made from results.json -->", "<!-- end -->"


def table(figures: Sequence[Figure]) -> list[str]:
    lines = [
        "| scenario | patches | step us | unpatched us | CPU | quartiles | bytecodes |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for one in figures:
        name = f"**{one.system}**" if one.system in (ALL, CONTROL) else one.system
        lines.append(
            f"| {one.scenario} | {name} | {one.step_us:.0f} | {one.unpatched_us:.0f} | {one.ratio - 1:+.1%} "
            f"| {one.low - 1:+.1%} to {one.high - 1:+.1%} | {one.operations_ratio - 1:+.1%} |"
        )
    return lines


def judged(figures: Sequence[Figure]) -> list[str]:
    """One line a patch that is over the limit; both figures have a say, for the clock is noisy and bytecodes differ."""
    over = [one for one in figures if one.system not in (ALL, CONTROL) and one.ratio > LIMIT]
    return [
        f"FAIL: {one.system} costs {one.ratio - 1:.1%} of a step in {one.scenario} (limit {LIMIT - 1:.0%})"
        for one in over
    ] or [f"pass: no patch costs more than {LIMIT - 1:.0%} of a step"]


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
