"""What the launches say together: a table, judged goals, a plot, results.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.scale.launch import Launch

LAUNCHER_MIB, LAUNCHER_SERVING, DEATH_SECONDS = 300.0, 0.10, 1.0
COLUMNS = (
    "nodes",
    "engines",
    "looked at s",
    "ready s",
    "launcher CPU s",
    "launcher MiB",
    "agents CPU s",
    "agents MiB",
    "ssh MiB",
    "launcher serving",
    "agents serving",
    "death seen ms",
    "down s",
)


def row(one: Launch) -> tuple[str, ...]:
    return (
        str(one.nodes),
        str(one.nodes * one.instances),
        f"{one.looked_at:.1f}",
        f"{one.ready:.1f}",
        f"{one.launcher_start.cpu:.1f}",
        f"{one.launcher_start.memory:.0f}",
        f"{one.agents_start.cpu:.1f}",
        f"{one.agents_start.memory:.0f}",
        f"{one.ways.memory:.0f}",
        f"{one.launcher_serving:.1%}",
        f"{one.agents_serving:.1%}",
        f"{one.death * 1000:.0f}",
        f"{one.down:.1f}",
    )


def goals(launches: Sequence[Launch]) -> list[tuple[str, str, bool]]:
    """(goal, found, met), over all sizes."""
    first, last = launches[0], launches[-1]
    grown, by = last.nodes / first.nodes, last.ready / first.ready
    memory = max(one.launcher_start.memory for one in launches)
    serving = max(one.launcher_serving for one in launches)
    death = max(one.death for one in launches)
    return [
        ("time to ready grows linearly or better", f"{by:.1f}x for {grown:.0f}x the nodes", by <= grown),
        (f"launcher under {LAUNCHER_MIB:.0f} MiB", f"{memory:.0f} MiB", memory < LAUNCHER_MIB),
        (f"launcher under {LAUNCHER_SERVING:.0%} of a core serving", f"{serving:.1%}", serving < LAUNCHER_SERVING),
        (f"a death seen within {DEATH_SECONDS:.0f} s", f"{death * 1000:.0f} ms", death < DEATH_SECONDS),
    ]


def show(launches: Sequence[Launch]) -> None:
    table = Table(*COLUMNS)
    for one in launches:
        table.add_row(*row(one))
    Console().print(table)
    for goal, found, met in goals(launches):
        print(f"{'pass' if met else 'FAIL'}  {goal}: {found}")


def write(launches: Sequence[Launch], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps([one.to_json() for one in launches], indent=1) + "\n")
    table = [
        f"| {' | '.join(COLUMNS)} |",
        f"| {' | '.join('---:' for _ in COLUMNS)} |",
        *(f"| {' | '.join(row(one))} |" for one in launches),
        "",
        *(f"- {'pass' if met else 'FAIL'}: {goal}: {found}" for goal, found, met in goals(launches)),
    ]
    (folder / "results.md").write_text("\n".join(table) + "\n")
    _plot(launches, folder / "results.png")


def _plot(launches: Sequence[Launch], path: Path) -> None:
    try:
        import matplotlib  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    nodes = [one.nodes for one in launches]
    panels = (
        ("time, s", {"ready": [one.ready for one in launches], "looked at": [one.looked_at for one in launches]}),
        (
            "CPU until ready, s",
            {
                "launcher": [one.launcher_start.cpu for one in launches],
                "agents": [one.agents_start.cpu for one in launches],
            },
        ),
        ("launcher's memory, MiB", {"peak": [one.launcher_start.memory for one in launches]}),
        ("launcher serving, % of a core", {"": [100 * one.launcher_serving for one in launches]}),
    )
    figure, axes = pyplot.subplots(1, len(panels), figsize=(16, 4), constrained_layout=True)
    for axis, (title, lines) in zip(axes, panels, strict=True):
        for label, values in lines.items():
            axis.plot(nodes, values, marker="o", label=label)
        axis.set_title(title)
        axis.set_xlabel("nodes of 8 engines")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        if len(lines) > 1:
            axis.legend()
    figure.savefig(path, dpi=110)
