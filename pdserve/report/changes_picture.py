"""The changes between two results at a load, each with its noise."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.bench.compare import Comparison, FigureChange
from pdserve.bench.compared_figures import Group
from pdserve.report.drawing import COLOURS, INK, SMALL, Picture, finished, new_axes

_LINE, _GAP = 0.2, 0.9
"""Inches."""
_DRAWN: tuple[Group, ...] = ("latencies", "rates")
"""Each of them is better or worse."""
_BETTER, _WORSE, _NONE = COLOURS[0], COLOURS[1], COLOURS[-1]


def change_pictures(comparison: Comparison) -> list[Picture]:
    """One a load, of the client's latencies and rates: what the engines counted may change by any factor, and is in the
    tables. A change within its noise is pale and hollow; one without any known noise has no bar."""
    return pictures_of(comparison.changes, "changes")


def pictures_of(changes: Sequence[FigureChange], name: str) -> list[Picture]:
    """The same of some changes; `name`: how the pictures' names begin."""
    loads = dict.fromkeys(change.load for change in changes)
    return [
        _picture(f"{name}-{number}", load, [each for each in changes if each.load == load and each.group in _DRAWN])
        for number, load in enumerate(loads, start=1)
    ]


def _picture(name: str, load: str, changes: Sequence[FigureChange]) -> Picture:
    shown = [each for each in changes if each.change is not None]
    axes = new_axes(height=_GAP + _LINE * len(shown))
    axes.axvline(0, color=INK, linewidth=1)
    kinds: dict[str, tuple[str, bool, list[tuple[int, FigureChange]]]] = {
        "B is better, beyond the noise": (_BETTER, True, []),
        "B is worse, beyond the noise": (_WORSE, True, []),
        "within the noise": (_NONE, False, []),
        "not judged: too few repeats": (INK, False, []),
    }
    for place, each in enumerate(shown):
        kinds[_kind(each)][2].append((place, each))
    for label, (colour, filled, some) in kinds.items():
        if not some:
            continue
        axes.errorbar(
            [100 * (each.change or 0.0) for _, each in some],
            [place for place, _ in some],
            xerr=[100 * (each.noise_share or 0.0) for _, each in some],
            fmt="o" if _judged(some) else "s",
            markersize=5,
            markerfacecolor=colour if filled else "none",
            color=colour,
            elinewidth=1.5,
            capsize=2 if _judged(some) else 0,
            label=label,
        )
    axes.set_yticks(range(len(shown)), [each.figure for each in shown], fontsize=SMALL)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlabel("change from A to B, %")
    real = sum(each.judgement == "real" for each in shown)
    note = "A bar is the 99 % interval of the change: where it touches 0, there is no change to speak of."
    return finished(name, load, note, axes, f"{real} of {len(shown)} changed by more than noise", bad=False)


def _kind(each: FigureChange) -> str:
    if each.judgement == "not judged":
        return "not judged: too few repeats"
    if each.judgement == "within noise":
        return "within the noise"
    return "B is better, beyond the noise" if each.better else "B is worse, beyond the noise"


def _judged(some: Sequence[tuple[int, FigureChange]]) -> bool:
    return all(each.judgement != "not judged" for _, each in some)
