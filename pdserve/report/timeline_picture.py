"""The timeline of a run as a picture: a lane a process, the measurements behind them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdserve.report.drawing import INK, WRONG, Picture, counted, finished, new_axes
from pdserve.report.timeline import LaneState, MarkKind, Timeline

_LOOKS: Mapping[LaneState, tuple[str, str, float]] = {
    # what a reader calls it, colour, height of the bar
    "starting": ("starting", "#2f7ed8", 0.3),
    "ready": ("ready", "#1a9850", 0.56),
    "silent": ("silent or degraded", "#e08214", 0.56),
    "dead": ("dead", WRONG, 0.3),
    "stopping": ("stopping", "#7f7f7f", 0.3),
}
_MARKS: Mapping[MarkKind, tuple[str, str, str]] = {
    "died": ("died", "x", INK),
    "restarting": ("is started again", "^", INK),
}
_LANE, _GAP = 0.26, 0.85
"""Inches a lane, and of all that is none."""
_BESIDE = {"died": 0.0, "restarting": 0.38}
"""Lanes below the middle: a restart follows its death at once, and must not hide it."""
_SHORTEST = 0.004
"""Share of the time that a bar has at least, or it could not be seen."""


def timeline_picture(number: int, of: Timeline) -> Picture:
    """`number`: of the run in the page."""
    axes = new_axes(height=_GAP + _LANE * len(of.lanes))
    _draw_windows(axes, of)
    _draw_lanes(axes, of)
    axes.set_yticks(range(len(of.lanes)), [lane.name for lane in of.lanes])
    axes.set_ylim(len(of.lanes) - 0.4, -0.6)
    axes.set_xlim(0, of.seconds or 1.0)
    axes.set_xlabel("seconds since the start")
    axes.grid(axis="y", visible=False)
    wrong = sum(not each.valid for each in of.windows)
    mark = counted(wrong, len(of.windows)) if of.windows else "nothing was measured on it"
    if of.incidents:
        mark = f"{len(of.incidents)} incident{'s' if len(of.incidents) > 1 else ''}, {mark}"
    bad = bool(wrong or of.incidents or not of.windows)
    return finished(
        f"timeline-{number}",
        f"Run {of.run_id}",
        f"On it: {of.of}.",
        axes,
        mark,
        bad=bad,
        minor=not bad,
        lines=tuple(f"{at:.1f} s: {what}" for at, what in of.incidents),
    )


def _draw_windows(axes: Any, of: Timeline) -> None:
    """INVALID ones have lines and no face: with both in one colour an SVG shows no lines."""
    looks: dict[bool, dict[str, Any]] = {
        True: {"color": INK, "alpha": 0.14},
        False: {"facecolor": "none", "edgecolor": WRONG, "hatch": "/////", "alpha": 0.8},
    }
    seen: set[str] = set()
    for window in of.windows:
        name = "VALID measurement" if window.valid else "INVALID measurement"
        axes.axvspan(window.began, window.ended, lw=0, label=_once(name, seen), **looks[window.valid])


def _draw_lanes(axes: Any, of: Timeline) -> None:
    seen: set[str] = set()
    for place, lane in enumerate(of.lanes):
        for span in lane.spans:
            name, colour, height = _LOOKS[span.state]
            width = max(span.ended - span.began, _SHORTEST * of.seconds)
            axes.barh(place, width, left=span.began, height=height, color=colour, label=_once(name, seen))
        for mark in lane.marks:
            name, shape, colour = _MARKS[mark.kind]
            axes.scatter(
                [mark.at],
                [place + _BESIDE[mark.kind]],
                marker=shape,
                s=46 if mark.kind == "died" else 20,
                color=colour,
                linewidths=1.6,
                zorder=4,
                clip_on=False,
                label=_once(name, seen),
            )


def _once(name: str, seen: set[str]) -> str:
    """One line in the legend for all of a kind: matplotlib leaves out what begins so."""
    if name in seen:
        return "_"
    seen.add(name)
    return name
