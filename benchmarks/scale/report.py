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


def row(launch: Launch) -> tuple[str, ...]:
    return (
        str(launch.nodes),
        str(launch.nodes * launch.instances),
        f"{launch.looked_at:.1f}",
        f"{launch.ready:.1f}",
        f"{launch.launcher_start.cpu:.1f}",
        f"{launch.launcher_start.memory:.0f}",
        f"{launch.agents_start.cpu:.1f}",
        f"{launch.agents_start.memory:.0f}",
        f"{launch.ways.memory:.0f}",
        f"{launch.launcher_serving:.1%}",
        f"{launch.agents_serving:.1%}",
        f"{launch.death * 1000:.0f}",
        f"{launch.down:.1f}",
    )


def goals(launches: Sequence[Launch]) -> list[tuple[str, str, bool]]:
    """(goal, found, met), over all sizes."""
    first, last = launches[0], launches[-1]
    grown, by = last.nodes / first.nodes, last.ready / first.ready
    memory = max(launch.launcher_start.memory for launch in launches)
    serving = max(launch.launcher_serving for launch in launches)
    death = max(launch.death for launch in launches)
    return [
        ("time to ready grows linearly or better", f"{by:.1f}x for {grown:.0f}x the nodes", by <= grown),
        (f"launcher under {LAUNCHER_MIB:.0f} MiB", f"{memory:.0f} MiB", memory < LAUNCHER_MIB),
        (f"launcher under {LAUNCHER_SERVING:.0%} of a core serving", f"{serving:.1%}", serving < LAUNCHER_SERVING),
        (f"a death seen within {DEATH_SECONDS:.0f} s", f"{death * 1000:.0f} ms", death < DEATH_SECONDS),
    ]


def show(launches: Sequence[Launch]) -> None:
    table = Table(*COLUMNS)
    for launch in launches:
        table.add_row(*row(launch))
    Console().print(table)
    for goal, value, met in goals(launches):
        print(f"{'pass' if met else 'FAIL'}  {goal}: {value}")


def write(launches: Sequence[Launch], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps([launch.to_json() for launch in launches], indent=1) + "\n")
    table = [
        f"| {' | '.join(COLUMNS)} |",
        f"| {' | '.join('---:' for _ in COLUMNS)} |",
        *(f"| {' | '.join(row(launch))} |" for launch in launches),
        "",
        *(f"- {'pass' if met else 'FAIL'}: {goal}: {value}" for goal, value, met in goals(launches)),
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

    nodes = [launch.nodes for launch in launches]
    panels = (
        (
            "time, s",
            {"ready": [launch.ready for launch in launches], "looked at": [launch.looked_at for launch in launches]},
        ),
        (
            "CPU until ready, s",
            {
                "launcher": [launch.launcher_start.cpu for launch in launches],
                "agents": [launch.agents_start.cpu for launch in launches],
            },
        ),
        ("launcher's memory, MiB", {"peak": [launch.launcher_start.memory for launch in launches]}),
        ("launcher serving, % of a core", {"": [100 * launch.launcher_serving for launch in launches]}),
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
