"""The pictures of a report, by matplotlib. An INVALID measurement is a red cross, and no line passes through it."""

from __future__ import annotations

import html
import io
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.bench.result import Measurement
from pdserve.errors import PreflightError
from pdserve.report.rows import ReportRow
from pdserve.report.stages import SOURCES, STAGES, prompt_sources, stages

_INK, _WRONG = "#010203", "#d62728"
_COLOURS = ("#2f7ed8", "#e08214", "#1a9850", "#9467bd", "#17a2b8", "#b8860b", "#d6569b", "#7f7f7f")
_MARKS = ("o", "s", "^", "D", "v", "P", "p", "h")
_SIZE = (5.2, 3.9)
Read = Callable[[Measurement], float | None]


@dataclass(frozen=True)
class Picture:
    """A picture and what a reader has to know of it."""

    name: str
    title: str
    note: str
    figure: Any
    """Of matplotlib."""

    @property
    def svg(self) -> str:
        """To be put into a page: its ink is that of the page, so that it is light on dark."""
        from matplotlib import rc_context

        out = io.StringIO()
        # The names of clip paths are made with the salt: two pictures of a page must not share them.
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": self.name}):
            self.figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        text = out.getvalue()
        text = text[text.index("<svg") :].replace(_INK, "var(--ink)")
        text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
        text = re.sub(r' id="(?:figure|axes|patch|text|line2d|matplotlib|xtick|ytick|legend|PathC)[^"]*"', "", text)
        head, rest = text.split(">", 1)
        head = re.sub(r' (?:width|height)="[^"]*"', "", head)  # as wide as the page makes it
        return f'{head} role="img" aria-label="{html.escape(self.title)}">{rest}'

    def save(self, folder: Path) -> None:
        """As PNG and SVG on white."""
        for kind in ("png", "svg"):
            self.figure.savefig(folder / f"{self.name}.{kind}", dpi=150, facecolor="white")


def check_matplotlib() -> None:
    """Raises PreflightError where the extra is missing."""
    try:
        import jinja2
        import matplotlib as mpl
    except ImportError as error:
        raise PreflightError(
            f"there is no {error.name} in this environment, and the report needs it",
            cause="the extra `report` of pdserve is not installed",
            todo="pip install 'pdserve[report]', with the pip of the environment that runs pdserve",
        ) from None
    del jinja2
    mpl.use("Agg")


def pictures(rows: Sequence[ReportRow]) -> list[Picture]:
    """Those for which there is something to draw."""
    measured = [row for row in rows if row.measurement is not None and row.measurement.figures.completed]
    closed = [row for row in measured if row.load.concurrency is not None]
    per_gpu = all(row.measurement is not None and row.measurement.figures.gpus for row in measured)
    made = []
    if measured:
        made.append(_pareto(measured, per_gpu=per_gpu))
    if closed:
        made.append(_against_load(closed, "ttft", "TTFT p50, ms", lambda each: _p50(each, "ttft")))
        made.append(_against_load(closed, "itl", "ITL p50, ms", lambda each: _p50(each, "itl")))
    if measured:
        made += _bars(measured)
    return made


def _pareto(rows: Sequence[ReportRow], *, per_gpu: bool) -> Picture:
    def throughput(each: Measurement) -> float | None:
        return each.figures.output_per_second_per_gpu if per_gpu else each.figures.output_per_second

    what = "output tokens/s per GPU" if per_gpu else "output tokens/s in all"
    figure, axes = _axes()
    axes.set_xlabel("interactivity, tokens/s/user")
    axes.set_ylabel(what)
    _curves(axes, rows, lambda each: each.figures.interactivity_by_itl.get("p50"), throughput)
    note = "Interactivity is 1000 / ITL p50 in ms. To the right and up is better. "
    note += (
        "GPUs of prefill and decode count together."
        if per_gpu
        else "Not per GPU: some engines have none (CPU), which shows mechanism and not the speed of a GPU."
    )
    return _picture("throughput", "Throughput against interactivity", note, figure, axes, rows)


def _against_load(rows: Sequence[ReportRow], name: str, label: str, read: Read) -> Picture:
    figure, axes = _axes()
    axes.set_xlabel("concurrency")
    axes.set_ylabel(label)
    _curves(axes, rows, None, read)
    axes.set_ylim(bottom=0)
    title = {"ttft": "Time to first token", "itl": "Time between chunks"}[name]
    return _picture(name, f"{title} against concurrency", "Lower is better.", figure, axes, rows)


def _curves(axes: Any, rows: Sequence[ReportRow], x: Read | None, y: Read) -> None:
    """A mark for each repeat, a line through the means of the VALID ones."""
    for index, series in enumerate(dict.fromkeys(row.series for row in rows)):
        colour, mark = _COLOURS[index % len(_COLOURS)], _MARKS[index % len(_MARKS)]
        spots: dict[str, list[tuple[float, float]]] = {}
        wrong: list[tuple[float, float]] = []
        for row in rows:
            if row.series != series or row.measurement is None:
                continue
            at = float(row.load.concurrency or 0) if x is None else x(row.measurement)
            value = y(row.measurement)
            if at is None or value is None:
                continue
            if row.valid:
                spots.setdefault(row.load.title, []).append((at, value))
            else:
                wrong.append((at, value))
        means = [tuple(statistics.fmean(part) for part in zip(*each, strict=True)) for each in spots.values()]
        if means:
            axes.plot(*zip(*means, strict=True), color=colour, linewidth=1.5)
            each = [spot for some in spots.values() for spot in some]
            axes.scatter(*zip(*each, strict=True), color=colour, marker=mark, s=26, label=_short(series), zorder=3)
        if wrong:
            axes.scatter(*zip(*wrong, strict=True), color=_WRONG, marker="x", s=60, linewidths=2, zorder=4)
            axes.scatter([], [], color=_WRONG, marker="x", label=f"INVALID: {_short(series)}")


def _bars(rows: Sequence[ReportRow]) -> list[Picture]:
    shown: list[tuple[str, ReportRow]] = []
    for row in rows:
        shown.append((f"{_short(row.series, 22)}\n{row.load.title} #{(row.repeat or 0) + 1}", row))
    made = []
    for name, title, note, label, parts, read in (
        (
            "sources",
            "Where the tokens of prompts came from, on prefill",
            "`pdserve bench` sends prompts that no cache has: the share of a cache is 0 in theory, and what is above it"
            " is blocks that random prompts share.",
            "share of prompt tokens, %",
            SOURCES,
            prompt_sources,
        ),
        (
            "stages",
            "Where the time of a request went",
            "Seconds that engines and proxy counted, a request. The transfer is from prefill's answer to decode's first"
            " byte, with decode's own queue.",
            "seconds a request",
            STAGES,
            stages,
        ),
    ):
        values = [(text, row, read(row.measurement)) for text, row in shown if row.measurement is not None]
        if not any(any(each.values()) for _, _, each in values):
            continue
        figure, axes = _axes(height=max(2.2, 1.1 + 0.42 * len(values)))
        left = [0.0] * len(values)
        for index, part in enumerate(parts):
            widths = [each.get(part, 0.0) for _, _, each in values]
            bars = axes.barh(range(len(values)), widths, left=left, color=_COLOURS[index], label=part, height=0.62)
            for bar, (_, row, _) in zip(bars, values, strict=True):
                bar.set_alpha(1.0 if row.valid else 0.3)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        for place, (_, row, _) in enumerate(values):
            if not row.valid:
                axes.text(left[place], place, " INVALID", color=_WRONG, va="center", fontsize=8, fontweight="bold")
        axes.set_yticks(range(len(values)), [text for text, _, _ in values], fontsize=7)
        axes.invert_yaxis()
        axes.set_xlabel(label)
        axes.margins(x=0.18)
        made.append(_picture(name, title, note, figure, axes, rows))
    return made


def _axes(height: float = _SIZE[1]) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_SIZE[0], height), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(color=_INK, alpha=0.15, linewidth=0.6)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_color(_INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _picture(name: str, title: str, note: str, figure: Any, axes: Any, rows: Sequence[ReportRow]) -> Picture:
    """With the mark of validity in the picture itself, so that a copy of it has the mark too."""
    wrong = sum(not row.valid for row in rows)
    mark = f"{wrong} of {len(rows)} measurements INVALID" if wrong else f"all {len(rows)} measurements VALID"
    axes.set_title(f"{title}\n{mark}", fontsize=9, color=_WRONG if wrong else _INK)
    axes.tick_params(colors=_INK, labelsize=8)
    axes.xaxis.label.set_color(_INK)
    axes.yaxis.label.set_color(_INK)
    handles, _ = axes.get_legend_handles_labels()
    if handles:
        figure.legend(
            loc="outside lower center", fontsize=7, frameon=False, labelcolor=_INK, ncols=1 if len(handles) < 3 else 2
        )
    return Picture(name, title, note, figure)


def _p50(each: Measurement, name: str) -> float | None:
    spread = getattr(each.figures, name)
    return None if spread is None else float(spread.p50)


def _short(text: str, most: int = 40) -> str:
    """A dollar begins a formula for matplotlib."""
    return (text if len(text) <= most else f"{text[: most - 1]}…").replace("$", r"\$")
