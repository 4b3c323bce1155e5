"""Where the tokens of prompts came from, and where the time of a request went, as bars."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdserve.bench.compare import asked_of
from pdserve.bench.result import Measurement
from pdserve.report.drawing import COLOURS, INK, SMALL, WRONG, Picture, counted, escaped, finished, new_axes
from pdserve.report.rows import ReportRow
from pdserve.report.stages import CACHES, SOURCES, STAGES, prompt_sources, stages

Parts = Mapping[str, float]
_BAR, _GAP = 0.34, 0.8
"""Inches a bar with the text above it, and of all that is no bar."""
_HEAD, _ABOVE = 0.42, 0.15
"""Bars: a line of a series' name, and the room above it."""


@dataclass(frozen=True)
class Bar:
    """The mean over the VALID repeats of a load, or an INVALID repeat."""

    series: str
    """As it is called."""
    text: str
    valid: bool
    parts: Parts
    mark: float | None
    """What the bar is held against."""


def sources_picture(rows: Sequence[ReportRow], names: Mapping[str, str]) -> Picture | None:
    """Hit rates beside their theory; None: nothing was counted."""
    bars = bars_of(rows, names, prompt_sources, lambda row: row.theory)
    note = (
        "Of the prompt tokens that prefill was asked for. In theory a cache without limits has those that an earlier"
        " prompt of the same measurement began with."
    )
    if not any(row.theory for row in rows):
        note += " Random prompts have none: what is above 0 % is blocks that they share with each other by chance."
    title = "Cache hits on prefill, against theory"
    return _picture("sources", title, note, "share of prompt tokens, %", SOURCES, "hits in theory", bars, rows)


def stages_picture(rows: Sequence[ReportRow], names: Mapping[str, str]) -> Picture | None:
    """None: nothing was counted."""
    bars = bars_of(rows, names, stages, _client_seconds)
    note = (
        "Seconds that engines and proxy counted, a request. The transfer is from prefill's answer to decode's first"
        " byte, with decode's own queue. The mark is the mean time of a whole request at the client: what is between"
        " the bar and the mark was not counted."
    )
    if lacking := [stage for stage in STAGES if not all(stage in bar.parts for bar in bars)]:
        note += f" Not counted everywhere, and missing there: {', '.join(lacking)}."
    title = "Where the time of a request went"
    return _picture("stages", title, note, "seconds a request", STAGES, "whole request, client", bars, rows)


def bars_of(
    rows: Sequence[ReportRow],
    names: Mapping[str, str],
    parts: Callable[[Measurement], Parts],
    mark: Callable[[ReportRow], float | None],
) -> list[Bar]:
    """In the order of the rows. INVALID repeats are in no mean."""
    groups: dict[tuple[str, str, int | None], list[ReportRow]] = {}
    for row in rows:
        if row.measurement is not None and row.answered:
            group = (row.series, asked_of(row.load), None if row.valid else row.repeat)
            groups.setdefault(group, []).append(row)
    asked = {(series, some[0].load.title, load) for (series, load, _), some in groups.items()}
    bars = []
    for (series, load, wrong), some in groups.items():
        title = some[0].load.title
        alone = sum((series, title) == each[:2] for each in asked) == 1
        what = f"{len(some)} repeats" if len(some) > 1 else "1 repeat"
        if wrong is not None:
            what = f"repeat {wrong + 1}"
        marks = [value for each in some if (value := mark(each)) is not None]
        bars.append(
            Bar(
                names[series],
                f"{title if alone else load}, {what}",
                wrong is None,
                _means([parts(row.measurement) for row in some if row.measurement is not None]),
                _mean(marks),
            )
        )
    return bars


def _picture(
    name: str,
    title: str,
    note: str,
    label: str,
    parts: Sequence[str],
    mark: str,
    bars: Sequence[Bar],
    rows: Sequence[ReportRow],
) -> Picture | None:
    bars = [bar for bar in bars if bar.parts]
    if not any(any(bar.parts.values()) for bar in bars):
        return None
    heads, places, below = _places(bars)
    axes = new_axes(height=_GAP + _BAR * below)
    left = [0.0] * len(bars)
    for index, part in enumerate(parts):
        widths = [bar.parts.get(part, 0.0) for bar in bars]
        colour = COLOURS[index] if part != "computed" else COLOURS[-1]
        patches = axes.barh(places, widths, left=left, color=colour, label=part, height=0.36)
        for patch, bar in zip(patches, bars, strict=True):
            patch.set_alpha(1.0 if bar.valid else 0.3)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    _texts(axes, bars, places, heads)
    marked = [(bar.mark, place) for bar, place in zip(bars, places, strict=True) if bar.mark is not None]
    if marked:
        axes.scatter(*zip(*marked, strict=True), marker="|", s=130, linewidths=2, color=INK, label=mark, zorder=4)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(axis="y", visible=False)
    axes.set_ylim(below, 0.0)
    # A mark at 0 would be half outside.
    furthest = max([*left, *(at for at, _ in marked)])
    axes.set_xlim(-0.01 * furthest, furthest * 1.04)
    axes.set_xlabel(label)
    wrong, drawn = sum(not row.valid for row in rows), sum(row.answered for row in rows)
    note += " A bar is the mean of the VALID repeats of a load; a pale one is INVALID and in no mean."
    return finished(name, title, note, axes, counted(wrong, len(rows), drawn=drawn), bad=bool(wrong))


def _places(bars: Sequence[Bar]) -> tuple[dict[float, str], list[float], float]:
    """From above: where each series is named, where each bar is, where all of it ends."""
    heads: dict[float, str] = {}
    places, below, before = [], 0.0, ""
    for bar in bars:
        if bar.series != before:
            head = escaped(bar.series)
            below += _HEAD * (1 + head.count("\n")) + _ABOVE
            heads[below] = head
            before = bar.series
        below += 1.0
        places.append(below - 0.25)
    return heads, places, below + 0.1


def _texts(axes: Any, bars: Sequence[Bar], places: Sequence[float], heads: Mapping[float, str]) -> None:
    """What each bar is, above it: a column beside the bars would take half of a phone."""

    def write(place: float, text: str, colour: str, weight: str) -> None:
        # x in shares of the axes, y in places. It must not make the axes smaller.
        transform = axes.get_yaxis_transform()
        axes.text(
            0, place, text, transform=transform, fontsize=SMALL, color=colour, fontweight=weight, va="bottom"
        ).set_in_layout(False)

    for place, text in heads.items():
        write(place, text, INK, "bold")
    for bar, place in zip(bars, places, strict=True):
        if bar.valid:
            write(place - 0.22, bar.text, INK, "normal")
        else:
            write(place - 0.22, f"INVALID: {bar.text}", WRONG, "bold")


def shares_of_caches(parts: Parts) -> float | None:
    """Per cent of the prompt tokens that a cache had; None: it was not counted."""
    return sum(parts.get(name, 0.0) for name in CACHES) if parts else None


def _client_seconds(row: ReportRow) -> float | None:
    e2e = None if row.measurement is None else row.measurement.figures.e2e
    return None if e2e is None else e2e.mean / 1000


def _means(some: Sequence[Parts]) -> Parts:
    """Of each part that was counted."""
    counted = dict.fromkeys(name for parts in some for name in parts)
    return {name: statistics.fmean(parts[name] for parts in some if name in parts) for name in counted}


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
