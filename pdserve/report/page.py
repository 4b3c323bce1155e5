"""A report or a comparison as one HTML file that needs nothing else."""

from __future__ import annotations

import html
import io
import re
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdserve.bench.result import Measurement
from pdserve.errors import PreflightError
from pdserve.report.rows import (
    CACHES,
    LACKING,
    SOURCES,
    STAGES,
    LaneState,
    ReportContents,
    ReportRow,
    Timeline,
    prompt_sources,
    provenance_view,
    stages,
)
from pdserve.sweep.compare import Comparison, asked_of, shown_groups, uncounted_figures

OVERVIEW = ("TTFT p50", "TTFT p99", "ITL p50", "E2E mean", "output")
"""Figures of the table of all points; each point has all of them."""


@dataclass(frozen=True)
class _Why:
    check: str
    text: str
    invalid: bool


def report_page(report: ReportContents, drawn: Sequence[Picture]) -> str:
    """Return provenance, pictures, what does not count, figures."""
    deployments = sorted({about.deployment for _, about in report.provenance})
    return _rendered(
        "report.html.j2",
        title=f"{', '.join(deployments) or 'nothing measured'}: benchmark report",
        report=report,
        about=provenance_view([(report.letter(series), about) for series, about in report.provenance]),
        deployments=deployments,
        counts={
            series: (len(rows), sum(not row.valid for row in rows))
            for series in report.names
            if (rows := [row for row in report.rows if row.series == series])
        },
        drawn=_figures(drawn),
        why=_reasons(report),
        hits=_hits,
        stages=stages,
        stage_names=STAGES,
    )


def pictures(report: ReportContents) -> list[Picture]:
    """Draw those pictures for which there is something to draw. Timelines come last."""
    names = report.names
    rows, made = report.rows, list[Picture | None]()
    closed = [row for row in rows if row.load.concurrency is not None]
    made += [pareto(rows, names), against_load(closed, "ttft", names), against_load(closed, "itl", names)]
    made += [sources_picture(report), stages_picture(report)]
    made += [timeline_picture(number, each) for number, each in enumerate(report.timelines, start=1)]
    return [picture for picture in made if picture is not None]


def comparison_page(names: tuple[str, str], deployments: Sequence[str], comparison: Comparison) -> str:
    """Return what differs, what is not compared, then each load or point that both have. `names`: what the two are
    called."""
    a, b = names
    return _rendered(
        "comparison.html.j2",
        title=f"{a} and {b}: comparison of benchmarks",
        a=a,
        b=b,
        deployments=deployments,
        lacking=LACKING,
        comparison=comparison,
        overview=OVERVIEW,
    )


def _rendered(template: str, **values: Any) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(groups=shown_groups, uncounted_figures=uncounted_figures)
    return environment.get_template(template).render(values)


def _figures(drawn: Sequence[Picture]) -> list[dict[str, object]]:
    from markupsafe import Markup

    # Not a text of others: matplotlib has written it, and has escaped what it drew.
    return [
        {
            "svg": Markup(each.svg),  # noqa: S704
            "note": each.note,
            "list": each.lines,
            "minor": each.minor,
            "timeline": each.name.startswith("timeline"),
        }
        for each in drawn
    ]


def _reasons(report: ReportContents) -> dict[_Why, list[str]]:
    """Return each reason once, with the rows that have it. INVALID ones first."""
    found: dict[_Why, list[str]] = {}
    for invalid in (True, False):
        for row in report.rows:
            for reason in row.reasons if invalid else row.unchecked:
                repeat = "" if row.repeat is None else f" #{row.repeat + 1}"
                where = found.setdefault(_Why(reason.check, reason.text, invalid), [])
                where.append(f"{report.letter(row.series)}, {row.load.title}{repeat}")
    return found


def _hits(row: ReportRow) -> str:
    """Show the hits as counted, and in theory."""
    share = None if row.measurement is None else shares_of_caches(prompt_sources(row.measurement))
    return ", ".join("-" if each is None else f"{each:.0f} %" for each in (share, row.theory))


INK, WRONG = "#010203", "#d62728"
"""Stand-ins: in a page they become the page's own colours, which differ between light and dark."""
COLOURS = ("#2f7ed8", "#e08214", "#1a9850", "#9467bd", "#17a2b8", "#b8860b", "#d6569b", "#7f7f7f")
MARKS = ("o", "s", "^", "D", "v", "P", "p", "h")
WIDTH = 3.9
"""Inches. A phone shows it at 1.3 pixels a point, so that its text can be read there."""
HEIGHT = 2.7
"""Inches, without the legend."""
SMALL, USUAL = 8.0, 8.5
"""Points."""
_LEGEND_LINE, _LEGEND_EDGE = 0.155, 0.15
"""Inches."""
_LEGEND_COLUMNS = 46


@dataclass(frozen=True)
class Picture:
    """A picture and what a reader has to know of it."""

    name: str
    title: str
    note: str
    figure: Any
    """A figure of matplotlib."""
    minor: bool = False
    """Nothing happened in it that a reader has to see at once."""
    lines: tuple[str, ...] = ()
    """What happened in it, in words."""

    @property
    def svg(self) -> str:
        """Return the SVG to be put into a page: its ink is that of the page, so that it is light on dark."""
        from matplotlib import rc_context

        out = io.StringIO()
        # The names of clip paths are made with the salt: two pictures of a page must not share them.
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": self.name}):
            self.figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        text = out.getvalue()
        text = text[text.index("<svg") :].replace(INK, "var(--ink)").replace(WRONG, "var(--bad)")
        text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
        text = re.sub(
            r' id="(?:figure|axes|patch|text|line2d|matplotlib|xtick|ytick|legend|[A-Z][A-Za-z]+_|PathC)[^"]*"',
            "",
            text,
        )
        head, rest = text.split(">", 1)
        head = re.sub(r' (?:width|height)="[^"]*"', "", head)  # as wide as the page makes it
        return f'{head} role="img" aria-label="{html.escape(self.title)}">{rest}'

    def save(self, folder: Path) -> None:
        """Save the picture as PNG and SVG on white."""
        for kind in ("png", "svg"):
            self.figure.savefig(folder / f"{self.name}.{kind}", dpi=150, facecolor="white")


def check_matplotlib() -> None:
    """Check that the packages of the extra `report` are installed. Raises PreflightError."""
    try:
        import jinja2
        import matplotlib as mpl
    except ImportError as error:
        raise PreflightError(
            f"there is no {error.name} in this environment, and the page needs it",
            cause="the extra `report` of pdserve is not installed",
            todo="pip install 'pdserve[report]', with the pip of the environment that runs pdserve",
        ) from None
    del jinja2
    mpl.use("Agg")


def new_axes(height: float = HEIGHT) -> Any:
    """Make axes of Matplotlib, on a figure of their own, in the ink of the page."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(color=INK, alpha=0.15, linewidth=0.6)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_color(INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return axes


def finish_picture(
    name: str,
    title: str,
    note: str,
    axes: Any,
    mark: str,
    *,
    bad: bool,
    minor: bool = False,
    lines: tuple[str, ...] = (),
) -> Picture:
    """Finish a picture with `mark`, the count of what does not count, in the picture itself: a copy of it has the mark
    too."""
    axes.figure.suptitle(f"{wrap_label(title, 52)}\n{mark}", fontsize=USUAL, color=WRONG if bad else INK)
    axes.tick_params(colors=INK, labelsize=SMALL)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(INK)
        label.set_fontsize(USUAL)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        columns = 2 if all(len(label) < 24 for label in labels) else 1
        height = sum(1 + label.count("\n") for label in labels)
        figure = axes.figure
        # The axes keep their height: what the legend needs is added.
        figure.set_figheight(figure.get_figheight() + _LEGEND_EDGE + _LEGEND_LINE * -(-height // columns))
        figure.legend(
            loc="outside lower left",
            fontsize=SMALL,
            frameon=False,
            labelcolor=INK,
            ncols=columns,
            columnspacing=1.2,
            handletextpad=0.5,
        )
    return Picture(name, title, note, axes.figure, minor, lines)


def mark_wrong(wrong: int, of: int, *, drawn: int | None = None) -> str:
    """Return the mark for `finish_picture`. `drawn`: how many of them are in the picture, if not all are."""
    text = f"{wrong} of {of} measurements INVALID" if wrong else f"all {of} measurements VALID"
    return text if drawn is None or drawn == of else f"{text} ({of - drawn} not drawn)"


def wrap_label(text: str, columns: int = _LEGEND_COLUMNS) -> str:
    """Break a text into several lines. A dollar begins a formula for matplotlib."""
    wrapped = textwrap.fill(text, columns, max_lines=4, placeholder=" …", break_on_hyphens=False)
    return wrapped.replace("$", r"\$")


Parts = Mapping[str, float]
_BAR, _GAP = 0.28, 0.8
"""Inches a bar, and of all that is no bar."""


@dataclass(frozen=True)
class Bar:
    """The mean over the VALID repeats of a load, or an INVALID repeat."""

    label: str
    valid: bool
    parts: Parts
    mark: float | None
    """What the bar is held against."""


def sources_picture(report: ReportContents) -> Picture | None:
    """Draw hit rates beside their theory; None: nothing was counted."""
    bars = bars_of(report, prompt_sources, lambda row: row.theory)
    note = (
        "Of the prompt tokens that prefill was asked for. In theory a cache without limits has those that an earlier"
        " prompt of the same measurement began with."
    )
    if not any(row.theory for row in report.rows):
        note += " Random prompts have none: what is above 0 % is blocks that they share with each other by chance."
    title = "Cache hits on prefill, against theory"
    return _bars_picture(
        "sources", title, note, "share of prompt tokens, %", SOURCES, "hits in theory", bars, report.rows
    )


def stages_picture(report: ReportContents) -> Picture | None:
    """Draw the stages of a request; None: nothing was counted."""
    bars = bars_of(report, stages, _client_seconds)
    note = (
        "Seconds that engines and proxy counted, a request. The transfer is from prefill's answer to decode's first"
        " byte, with decode's own queue. The mark is the mean time of a whole request at the client: what is between"
        " the bar and the mark was not counted."
    )
    if lacking := [stage for stage in STAGES if not all(stage in bar.parts for bar in bars)]:
        note += f" Not counted everywhere, and missing there: {', '.join(lacking)}."
    title = "Where the time of a request went"
    mark = "whole request, client"
    return _bars_picture("stages", title, note, "seconds a request", STAGES, mark, bars, report.rows)


def bars_of(
    report: ReportContents,
    parts: Callable[[Measurement], Parts],
    mark: Callable[[ReportRow], float | None],
) -> list[Bar]:
    """Make the bars, in the order of the rows. INVALID repeats are in no mean."""
    groups: dict[tuple[str, str, int | None], list[ReportRow]] = {}
    for row in report.rows:
        if row.answered:
            group = (row.series, asked_of(row.load), None if row.valid else row.repeat)
            groups.setdefault(group, []).append(row)
    bars = []
    for (series, _, wrong), some in groups.items():
        which = f"{report.letter(series)}: " if len(report.names) > 1 else ""
        repeat = "" if wrong is None else f"\nINVALID #{wrong + 1}"
        marks = [value for each in some if (value := mark(each)) is not None]
        counted = [parts(row.measurement) for row in some if row.measurement is not None]
        bars.append(
            Bar(
                f"{which}{some[0].load.title}{repeat}",
                wrong is None,
                {
                    name: statistics.fmean(each[name] for each in counted if name in each)
                    for name in dict.fromkeys(name for each in counted for name in each)
                },
                statistics.fmean(marks) if marks else None,
            )
        )
    return bars


def _bars_picture(
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
    places = range(len(bars))
    axes = new_axes(height=_GAP + _BAR * len(bars))
    left = [0.0] * len(bars)
    for index, part in enumerate(parts):
        widths = [bar.parts.get(part, 0.0) for bar in bars]
        colour = COLOURS[index] if part != "computed" else COLOURS[-1]
        patches = axes.barh(places, widths, left=left, color=colour, label=part, height=0.6)
        for patch, bar in zip(patches, bars, strict=True):
            patch.set_alpha(1.0 if bar.valid else 0.3)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    marked = [(bar.mark, place) for bar, place in zip(bars, places, strict=True) if bar.mark is not None]
    if marked:
        axes.scatter(*zip(*marked, strict=True), marker="|", s=130, linewidths=2, color=INK, label=mark, zorder=4)
    axes.set_yticks(places, [bar.label for bar in bars])
    axes.grid(axis="y", visible=False)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    # A mark at 0 would be half outside.
    furthest = max([*left, *(at for at, _ in marked)])
    axes.set_xlim(-0.01 * furthest, furthest * 1.04)
    axes.set_xlabel(label)
    wrong, drawn = sum(not row.valid for row in rows), sum(row.answered for row in rows)
    note += " A bar is the mean of the VALID repeats of a load; a pale one is INVALID and in no mean."
    picture = finish_picture(name, title, note, axes, mark_wrong(wrong, len(rows), drawn=drawn), bad=bool(wrong))
    for text, bar in zip(axes.get_yticklabels(), bars, strict=True):
        text.set_color(INK if bar.valid else WRONG)
    return picture


def shares_of_caches(parts: Parts) -> float | None:
    """Return the per cent of the prompt tokens that a cache had; None: it was not counted."""
    return sum(parts.get(name, 0.0) for name in CACHES) if parts else None


def _client_seconds(row: ReportRow) -> float | None:
    e2e = None if row.measurement is None else row.measurement.figures.e2e
    return None if e2e is None else e2e.mean / 1000


Read = Callable[[ReportRow, Measurement], float | None]
Spot = tuple[float, float]
_ROOM = 1.1
_WIDE = 8
"""From this ratio of the largest to the smallest concurrency on, the axis is logarithmic."""


@dataclass
class Curve:
    """Holds of a series the repeats of each load, and what does not count."""

    loads: dict[str, list[Spot]] = field(default_factory=dict)
    """The repeats by what was asked for, in its order."""
    short: dict[str, str] = field(default_factory=dict)
    """What a reader calls each load."""
    wrong: list[Spot] = field(default_factory=list)

    @property
    def means(self) -> dict[str, Spot]:
        """Return the mean of the valid repeats by what was asked for."""
        return {
            name: (statistics.fmean(s[0] for s in spots), statistics.fmean(s[1] for s in spots))
            for name, spots in self.loads.items()
        }


def pareto(rows: Sequence[ReportRow], names: Mapping[str, str]) -> Picture | None:
    """Draw throughput against interactivity, and the front: what no other point beats in both. None: answers of a
    single token have no interactivity."""
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
    return _curves_picture("throughput", "Throughput against interactivity", note, axes, rows)


def against_load(rows: Sequence[ReportRow], name: str, names: Mapping[str, str]) -> Picture | None:
    """Draw a figure against concurrency. `name`: of the figure, ttft or itl. None: answers of a single token have no
    ITL."""
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
    return _curves_picture(name, f"{title} against concurrency", "Lower is better.", axes, rows)


def curves_of(rows: Sequence[ReportRow], x: Read, y: Read) -> dict[str, Curve]:
    """Return the curve of each series."""
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
    """Return those spots that no other one beats in both, from left to right."""
    best: list[Spot] = []
    for spot in sorted(spots, reverse=True):
        if not best or spot[1] > best[-1][1]:
            best.append(spot)
    return best[::-1]


def _draw(axes: Any, curves: Mapping[str, Curve], names: Mapping[str, str], best: Sequence[Spot] | None = None) -> None:
    """Draw a mark for each repeat, a line through the means of the VALID ones. `best`: the front, where points are
    named by their load."""
    for index, series in enumerate(names):
        if (curve := curves.get(series)) is None:
            continue
        # Where the colours begin again, the marks are shifted: no pair is there twice.
        colour, mark = COLOURS[index % len(COLOURS)], MARKS[(index + index // len(COLOURS)) % len(MARKS)]
        label = wrap_label(names[series])
        if means := curve.means:
            axes.plot(*zip(*means.values(), strict=True), color=colour, linewidth=1.5)
            each = [spot for some in curve.loads.values() for spot in some]
            axes.scatter(*zip(*each, strict=True), color=colour, marker=mark, s=20, label=label, zorder=3)
            for load, spot in means.items() if best is not None else ():
                # Away from the curves: what is on the front has nothing above it to the right.
                place, side = ((5, 4), "left") if spot in (best or ()) else ((-5, -10), "right")
                axes.annotate(
                    curve.short[load],
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


def _from_zero(axes: Any, curves: Mapping[str, Curve], *, x: bool = False) -> None:
    """Let the axes begin at 0, and leave room for the marks and their names at the other end."""
    spots = [spot for curve in curves.values() for some in (*curve.loads.values(), curve.wrong) for spot in some]
    axes.set_ylim(0, _ROOM * max(spot[1] for spot in spots) or 1.0)
    if x:
        axes.set_xlim(0, _ROOM * max(spot[0] for spot in spots) or 1.0)


def _concurrencies(axes: Any, values: Sequence[int]) -> None:
    """Set a tick at each concurrency that was measured."""
    if values[-1] >= _WIDE * values[0]:
        axes.set_xscale("log", base=2)
    axes.set_xticks(values, [str(value) for value in values])
    axes.minorticks_off()


def _curves_picture(name: str, title: str, note: str, axes: Any, rows: Sequence[ReportRow]) -> Picture:
    wrong, drawn = sum(not row.valid for row in rows), sum(row.answered for row in rows)
    note += " Each mark is a repeat, a line goes through the means of the VALID ones; a red cross is INVALID."
    return finish_picture(name, title, note, axes, mark_wrong(wrong, len(rows), drawn=drawn), bad=bool(wrong))


def _short_load(row: ReportRow) -> str:
    return f"{row.load.rate:g} r/s" if row.load.rate is not None else str(row.load.concurrency)


_LOOKS: Mapping[LaneState, tuple[str, str, float]] = {
    # what a reader calls it, colour, height of the bar
    "starting": ("starting", "#2f7ed8", 0.3),
    "ready": ("ready", "#1a9850", 0.56),
    "silent": ("silent or degraded", "#e08214", 0.56),
    "dead": ("dead", WRONG, 0.3),
    "stopping": ("stopping", "#7f7f7f", 0.3),
}
_LANE, _TIMELINE_GAP = 0.26, 0.85
"""Inches a lane, and of all that is none."""
_SHORTEST = 0.004
"""Share of the time that a bar has at least, or it could not be seen."""


def timeline_picture(number: int, of: Timeline) -> Picture:
    """Draw the timeline of a run. `number`: of the run in the page."""
    axes = new_axes(height=_TIMELINE_GAP + _LANE * len(of.lanes))
    _draw_windows(axes, of)
    _draw_lanes(axes, of)
    axes.set_yticks(range(len(of.lanes)), [lane.name for lane in of.lanes])
    axes.set_ylim(len(of.lanes) - 0.4, -0.6)
    axes.set_xlim(0, of.seconds or 1.0)
    axes.set_xlabel("seconds since the start")
    axes.grid(axis="y", visible=False)
    wrong = sum(not each.valid for each in of.windows)
    mark = mark_wrong(wrong, len(of.windows)) if of.windows else "nothing was measured on it"
    if of.incidents:
        mark = f"{len(of.incidents)} incident{'s' if len(of.incidents) > 1 else ''}, {mark}"
    bad = bool(wrong or of.incidents or not of.windows)
    return finish_picture(
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
    """Draw the measurements. INVALID ones have lines and no face: with both in one colour an SVG shows no lines."""
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
        if lane.deaths:
            spots = lane.deaths, [place] * len(lane.deaths)
            axes.scatter(*spots, marker="x", s=46, color=INK, linewidths=1.6, zorder=4, label=_once("died", seen))


def _once(name: str, seen: set[str]) -> str:
    """Return a label that gives one line in the legend to all of a kind: matplotlib leaves out what begins with `_`."""
    if name in seen:
        return "_"
    seen.add(name)
    return name
