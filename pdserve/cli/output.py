"""Print what a verb has found: with colours on a terminal, plain lines elsewhere. What others have written (lines of
logs, commands of other users) moves no terminal. Imports little, for a fast `--help`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from pdserve.printable import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Cell = str | tuple[str, str]
"""A text, or a text and its style."""
_COLUMNS_OF_A_FILE = 200


def table(columns: Iterable[str], rows: Iterable[Sequence[Cell]], *, title: str | None = None) -> Table:
    """Return a table that is drawn."""
    from rich.table import Table
    from rich.text import Text

    made = Table(*columns, title=title, header_style="bold")
    for row in rows:
        cells = ((cell, "") if isinstance(cell, str) else cell for cell in row)
        made.add_row(*(Text(printable(text), style=style) for text, style in cells))
    return made


class VerbOutput:
    """Prints the lines and tables of a verb."""

    def __init__(self, *, stderr: bool = False, goes_on: bool = False) -> None:
        """`goes_on`: also when nothing takes its lines any more."""
        self._stderr = stderr
        self._goes_on = goes_on
        self.is_terminal = (sys.stderr if stderr else sys.stdout).isatty()

    @cached_property
    def _console(self) -> Console:
        """Return a console as wide as the terminal; in a file or a pipe, wide enough that no cell is cut."""
        from rich.console import Console, ConsoleDimensions

        from pdserve.operations.progress import ProgressTerminal

        console = ProgressTerminal(stderr=self._stderr) if self._goes_on else Console(stderr=self._stderr)
        if not console.is_terminal:
            console.size = ConsoleDimensions(_COLUMNS_OF_A_FILE, console.height)
        return console

    def line(self, text: str, style: str = "") -> None:
        """Print a line, which a terminal may wrap."""
        if not self.is_terminal and not self._goes_on:
            print(printable(text), file=sys.stderr if self._stderr else sys.stdout)
            return
        from rich.text import Text

        self._console.print(Text(printable(text), style=style), soft_wrap=True, highlight=False)

    def table(self, drawn: Table) -> None:
        """Print a table as it is drawn, in a pipe too: its columns are for people."""
        self._console.print(drawn, soft_wrap=False)

    def rows(self, columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> None:
        """Print a table; in a pipe a row is a line, its cells apart by tabs."""
        if self.is_terminal:
            self.table(table(columns, rows))
            return
        for row in (columns, *rows):
            self.line("\t".join(cell if isinstance(cell, str) else cell[0] for cell in row))
