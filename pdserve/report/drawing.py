"""What all pictures of a page share: size, ink, colours, the mark of INVALID, and how they get into a page."""

from __future__ import annotations

import html
import io
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.errors import PreflightError

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
    """Of matplotlib."""
    minor: bool = False
    """Nothing happened in it that a reader has to see at once."""
    lines: tuple[str, ...] = ()
    """What happened in it, in words."""

    @property
    def svg(self) -> str:
        """To be put into a page: its ink is that of the page, so that it is light on dark."""
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
            f"there is no {error.name} in this environment, and the page needs it",
            cause="the extra `report` of pdserve is not installed",
            todo="pip install 'pdserve[report]', with the pip of the environment that runs pdserve",
        ) from None
    del jinja2
    mpl.use("Agg")


def new_axes(height: float = HEIGHT) -> Any:
    """Matplotlib's, on a figure of their own, in the ink of the page."""
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


def finished(
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
    """With `mark`, the count of what does not count, in the picture itself: a copy of it has the mark too."""
    axes.set_title(f"{escaped(title, 52)}\n{mark}", fontsize=USUAL, color=WRONG if bad else INK)
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


def counted(wrong: int, of: int, *, drawn: int | None = None) -> str:
    """For `finished`. `drawn`: how many of them are in the picture, if not all are."""
    text = f"{wrong} of {of} measurements INVALID" if wrong else f"all {of} measurements VALID"
    return text if drawn is None or drawn == of else f"{text} ({of - drawn} not drawn)"


def escaped(text: str, columns: int = _LEGEND_COLUMNS) -> str:
    """On several lines. A dollar begins a formula for matplotlib."""
    wrapped = textwrap.fill(text, columns, max_lines=4, placeholder=" …", break_on_hyphens=False)
    return wrapped.replace("$", r"\$")
