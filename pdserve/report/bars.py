"""Where the tokens of prompts came from, and where the time of a request went, as bars."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdserve.bench.result import Measurement
from pdserve.report.drawing import COLOURS, INK, SMALL, WRONG, Picture, escaped, finished, new_axes, verdict_mark
from pdserve.report.rows import ReportRow
from pdserve.report.stages import CACHES, SOURCES, STAGES, prompt_sources, stages, theoretical_hit

Parts = Mapping[str, float]
_BAR, _GAP = 0.34, 0.9
"""Inches a bar with the text above it, and of all that is no bar."""


@dataclass(frozen=True)
class Bar:
    """The mean over the VALID repeats of a load, or an INVALID repeat."""

    text: str
    valid: bool
    parts: Parts
    mark: float | None
    """What the bar is held against."""


def sources_picture(rows: Sequence[ReportRow], names: Mapping[str, str]) -> Picture | None:
    """Hit rates beside their theory; None: nothing was counted."""
    bars = bars_of(rows, names, prompt_sources, lambda _: theoretical_hit())
    note = (
        "Of the prompt tokens that prefill was asked for. `pdserve bench` sends prompts that no cache has: in theory"
        " the share of the caches is 0 %, and what is above it is blocks that random prompts share with each other."
    )
    title = "Cache hits of prompts on prefill, against theory"
    return _picture("sources", title, note, "share of prompt tokens, %", SOURCES, "hits in theory", bars, rows)


def stages_picture(rows: Sequence[ReportRow], names: Mapping[str, str]) -> Picture | None:
    """None: nothing was counted."""
    bars = bars_of(rows, names, stages, _client_seconds)
    note = (
        "Seconds that engines and proxy counted, a request. The transfer is from prefill's answer to decode's first"
        " byte, with decode's own queue. The mark is the mean time of a whole request at the client: what is between"
        " the bar and the mark was counted by nobody."
    )
    if lacking := [stage for stage in STAGES if not all(stage in bar.parts for bar in bars)]:
        note += f" Not counted everywhere, and missing there: {', '.join(lacking)}."
    title = "Where the time of a request went"
    return _picture("stages", title, note, "seconds a request", STAGES, "whole request, client", bars, rows)


def bars_of(
    rows: Sequence[ReportRow],
    names: Mapping[str, str],
    parts: Callable[[Measurement], Parts],
    mark: Callable[[Measurement], float | None],
) -> list[Bar]:
    """In the order of the rows. INVALID repeats are in no mean."""
    groups: dict[tuple[str, str, int | None], list[Measurement]] = {}
    for row in rows:
        if row.measurement is not None:
            group = (row.series, row.load.title, None if row.valid else row.repeat)
            groups.setdefault(group, []).append(row.measurement)
    bars = []
    for (series, load, wrong), some in groups.items():
        what = f"{len(some)} repeats" if len(some) > 1 else "1 repeat"
        if wrong is not None:
            what = f"repeat {wrong + 1}"
        marks = [value for each in some if (value := mark(each)) is not None]
        text = f"{names[series]}; {load}, {what}"
        bars.append(Bar(text, wrong is None, _means(list(map(parts, some))), _mean(marks)))
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
    texts = [escaped(bar.text, 56) for bar in bars]
    places, below = [], 0.0
    for text in texts:
        below += 1.0 + 0.55 * text.count("\n")
        places.append(below)
    axes = new_axes(height=_GAP + _BAR * (below + 1) + 0.4)
    left = [0.0] * len(bars)
    for index, part in enumerate(parts):
        widths = [bar.parts.get(part, 0.0) for bar in bars]
        colour = COLOURS[index] if part != "computed" else COLOURS[-1]
        drawn = axes.barh(places, widths, left=left, color=colour, label=part, height=0.36)
        for patch, bar in zip(drawn, bars, strict=True):
            patch.set_alpha(1.0 if bar.valid else 0.3)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    _texts(axes, bars, texts, places)
    marked = [(bar.mark, place) for bar, place in zip(bars, places, strict=True) if bar.mark is not None]
    if marked:
        axes.scatter(*zip(*marked, strict=True), marker="|", s=130, linewidths=2, color=INK, label=mark, zorder=4)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(axis="y", visible=False)
    axes.set_ylim(below + 0.5, 0.0)
    # A mark at 0 would be half outside.
    furthest = max([*left, *(at for at, _ in marked)])
    axes.set_xlim(-0.01 * furthest, furthest * 1.04)
    axes.set_xlabel(label)
    wrong = sum(not row.valid for row in rows)
    note += " A bar is the mean of the VALID repeats of a load; a pale one is INVALID and in no mean."
    return finished(name, title, note, axes, verdict_mark(wrong, len(rows)), bad=bool(wrong))


def _texts(axes: Any, bars: Sequence[Bar], texts: Sequence[str], places: Sequence[float]) -> None:
    """What each bar is, above it: a column beside the bars would take half of a phone."""
    for bar, text, place in zip(bars, texts, places, strict=True):
        shown = text if bar.valid else f"INVALID: {text}"
        colour, weight = (INK, "normal") if bar.valid else (WRONG, "bold")
        # x in shares of the axes, y in places.
        axes.text(
            0,
            place - 0.24,
            shown,
            transform=axes.get_yaxis_transform(),
            fontsize=SMALL,
            color=colour,
            fontweight=weight,
            va="bottom",
        )


def shares_of_caches(parts: Parts) -> float | None:
    """Per cent of the prompt tokens that a cache had; None: it was not counted."""
    return sum(parts.get(name, 0.0) for name in CACHES) if parts else None


def _client_seconds(each: Measurement) -> float | None:
    return None if each.figures.e2e is None else each.figures.e2e.mean / 1000


def _means(some: Sequence[Parts]) -> Parts:
    """Of each part that was counted."""
    counted = dict.fromkeys(name for parts in some for name in parts)
    return {name: statistics.fmean(parts[name] for parts in some if name in parts) for name in counted}


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
