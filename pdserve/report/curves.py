"""Throughput, TTFT and ITL as curves. An INVALID measurement is a red cross, and no line passes through it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdserve.bench.compare import asked_of
from pdserve.bench.result import Measurement
from pdserve.report.drawing import COLOURS, INK, MARKS, SMALL, WRONG, Picture, counted, escaped, finished, new_axes
from pdserve.report.rows import ReportRow

Read = Callable[[ReportRow, Measurement], float | None]
Spot = tuple[float, float]
_ROOM = 1.1
_WIDE = 8
"""From this ratio of the largest to the smallest concurrency on, the axis is logarithmic."""


@dataclass
class Curve:
    """Of a series: the repeats of each load, and what does not count."""

    loads: dict[str, list[Spot]] = field(default_factory=dict)
    """By what was asked for, in its order."""
    short: dict[str, str] = field(default_factory=dict)
    """What a reader calls each of them."""
    wrong: list[Spot] = field(default_factory=list)

    @property
    def means(self) -> dict[str, Spot]:
        """By what was asked for."""
        return {name: (_mean(s[0] for s in spots), _mean(s[1] for s in spots)) for name, spots in self.loads.items()}

    def name(self, asked: str) -> str:
        """Short where no other load of the curve has that name."""
        short = self.short[asked]
        return short if list(self.short.values()).count(short) == 1 else asked


def pareto(rows: Sequence[ReportRow], names: Mapping[str, str]) -> Picture | None:
    """Throughput against interactivity, and the front: what no other point beats in both. None: answers of a single
    token have no interactivity."""
    per_gpu = all(row.measurement.figures.gpus for row in rows if row.measurement is not None)

    def throughput(_: ReportRow, each: Measurement) -> float | None:
        return each.figures.output_per_second_per_gpu if per_gpu else each.figures.output_per_second

    curves = curves_of(rows, lambda _, each: each.figures.interactivity_by_itl.get("p50"), throughput)
    if not curves:
        return None
    axes = new_axes()
    axes.set_xlabel("interactivity, tokens/s/user")
    axes.set_ylabel("output tokens/s per GPU" if per_gpu else "output tokens/s in all")
    best = front([spot for curve in curves.values() for spot in curve.means.values()])
    _draw(axes, curves, names, best)
    if len(curves) > 1 and len(best) > 1:
        axes.plot(*zip(*best, strict=True), color=INK, alpha=0.5, linewidth=1, linestyle=":", label="Pareto front")
    _from_zero(axes, curves, x=True)
    note = (
        "Interactivity is 1000 / ITL p50 in ms. To the right and up is better. A number at a point is its load: the"
        " concurrency, or requests/s (r/s). "
    )
    note += (
        "GPUs of prefill and decode count together."
        if per_gpu
        else "Not per GPU: some engines have none (CPU), which shows mechanism and not the speed of a GPU."
    )
    return _picture("throughput", "Throughput against interactivity", note, axes, rows)


def against_load(rows: Sequence[ReportRow], name: str, names: Mapping[str, str]) -> Picture | None:
    """`name`: of the figure, ttft or itl. None: answers of a single token have no ITL."""
    title = {"ttft": "Time to first token (TTFT)", "itl": "Time between chunks (ITL)"}[name]

    def read(_: ReportRow, each: Measurement) -> float | None:
        spread = getattr(each.figures, name)
        return None if spread is None else float(spread.p50)

    curves = curves_of(rows, lambda row, _: float(row.load.concurrency or 0), read)
    if not curves:
        return None
    axes = new_axes()
    axes.set_xlabel("concurrency")
    axes.set_ylabel(f"{name.upper()} p50, ms")
    _draw(axes, curves, names)
    _concurrencies(axes, sorted({row.load.concurrency for row in rows if row.load.concurrency is not None}))
    _from_zero(axes, curves)
    return _picture(name, f"{title} against concurrency", "Lower is better.", axes, rows)


def curves_of(rows: Sequence[ReportRow], x: Read, y: Read) -> dict[str, Curve]:
    """By series."""
    curves: dict[str, Curve] = {}
    for row in rows:
        if row.measurement is None or not row.answered:
            continue
        at, value = x(row, row.measurement), y(row, row.measurement)
        if at is None or value is None:
            continue
        curve = curves.setdefault(row.series, Curve())
        if row.valid:
            asked = asked_of(row.load)
            curve.loads.setdefault(asked, []).append((at, value))
            curve.short[asked] = _short_load(row)
        else:
            curve.wrong.append((at, value))
    return curves


def front(spots: Sequence[Spot]) -> list[Spot]:
    """Those that no other one beats in both, from left to right."""
    best: list[Spot] = []
    for spot in sorted(spots, reverse=True):
        if not best or spot[1] > best[-1][1]:
            best.append(spot)
    return best[::-1]


def _draw(axes: Any, curves: Mapping[str, Curve], names: Mapping[str, str], best: Sequence[Spot] | None = None) -> None:
    """A mark for each repeat, a line through the means of the VALID ones. `best`: the front, where points are named by
    their load."""
    for index, series in enumerate(names):
        if (curve := curves.get(series)) is None:
            continue
        colour, mark = _look(index)
        label = escaped(names[series])
        if means := curve.means:
            axes.plot(*zip(*means.values(), strict=True), color=colour, linewidth=1.5)
            each = [spot for some in curve.loads.values() for spot in some]
            axes.scatter(*zip(*each, strict=True), color=colour, marker=mark, s=20, label=label, zorder=3)
            for load, spot in means.items() if best is not None else ():
                # Away from the curves: what is on the front has nothing above it to the right.
                place, side = ((5, 4), "left") if spot in (best or ()) else ((-5, -10), "right")
                axes.annotate(
                    curve.name(load),
                    spot,
                    place,
                    textcoords="offset points",
                    ha=side,
                    fontsize=SMALL,
                    color=colour,
                    zorder=5,
                )
        if curve.wrong:
            axes.scatter(*zip(*curve.wrong, strict=True), color=WRONG, marker="x", s=50, linewidths=2, zorder=4)
            which = names[series].removesuffix(series).rstrip(": ")
            axes.scatter([], [], color=WRONG, marker="x", label=f"INVALID: {which}" if which else "INVALID")


def _look(index: int) -> tuple[str, str]:
    """Colour and mark of a series. Where the colours begin again, the marks are shifted: no pair is there twice."""
    return COLOURS[index % len(COLOURS)], MARKS[(index + index // len(COLOURS)) % len(MARKS)]


def _from_zero(axes: Any, curves: Mapping[str, Curve], *, x: bool = False) -> None:
    """The axes begin at 0, and leave room for the marks and their names at the other end."""
    spots = [spot for curve in curves.values() for some in (*curve.loads.values(), curve.wrong) for spot in some]
    axes.set_ylim(0, _ROOM * max(spot[1] for spot in spots) or 1.0)
    if x:
        axes.set_xlim(0, _ROOM * max(spot[0] for spot in spots) or 1.0)


def _concurrencies(axes: Any, values: Sequence[int]) -> None:
    """A tick at each that was measured."""
    if values[-1] >= _WIDE * values[0]:
        axes.set_xscale("log", base=2)
    axes.set_xticks(values, [str(value) for value in values])
    axes.minorticks_off()


def _picture(name: str, title: str, note: str, axes: Any, rows: Sequence[ReportRow]) -> Picture:
    wrong, drawn = sum(not row.valid for row in rows), sum(row.answered for row in rows)
    note += " Each mark is a repeat, a line goes through the means of the VALID ones; a red cross is INVALID."
    return finished(name, title, note, axes, counted(wrong, len(rows), drawn=drawn), bad=bool(wrong))


def _short_load(row: ReportRow) -> str:
    return f"{row.load.rate:g} r/s" if row.load.rate is not None else str(row.load.concurrency)


def _mean(values: Any) -> float:
    return statistics.fmean(values)
