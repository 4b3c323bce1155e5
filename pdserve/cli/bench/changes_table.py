"""The table of the figures of a load, in a comparison."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from pdserve.bench.compare import FigureChange, shown_groups, zeros

_STYLES = {"real": "bold", "within noise": "dim", "not judged": "yellow"}


def changes_table(title: str, changes: Sequence[FigureChange]) -> Table:
    """A change that may be noise is in parentheses. What nothing was counted of on both sides is named below."""
    table = Table(title=title, header_style="bold")
    for column in ("figure", "A", "B", "change", "noise (99 %)", "judgement"):
        table.add_column(column)
    for group, its_changes in shown_groups(changes).items():
        table.add_row(Text(group, style="italic"))
        for each in its_changes:
            noise = "-" if each.noise_share is None else f"±{each.noise_share:.1%}"
            change = "-" if each.change is None else f"{each.change:+.1%}"
            # It is not shown as a figure that a reader could quote.
            shown = change if each.judgement == "real" else f"({change})"
            judgement = Text(each.shown, style=_STYLES[each.judgement])
            table.add_row(f"  {each.figure}, {each.unit}", f"{each.a:.2f}", f"{each.b:.2f}", shown, noise, judgement)
        table.add_section()
    if nothing := zeros(changes):
        table.caption = f"0 on both sides: {', '.join(nothing)}"
    return table
