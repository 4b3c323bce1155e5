"""A console for tables with many columns."""

from __future__ import annotations

from rich.console import Console, ConsoleDimensions

from pdserve.cli.console import ProgressTerminal

_COLUMNS_OF_A_FILE = 200


def wide_console(*, stderr: bool = False, goes_on: bool = False) -> Console:
    """As wide as the terminal; in a file or a pipe, wide enough that no cell is cut. `goes_on`: also when nothing takes
    its lines any more."""
    console = ProgressTerminal(stderr=stderr) if goes_on else Console(stderr=stderr, soft_wrap=True, highlight=False)
    if not console.is_terminal:
        console.size = ConsoleDimensions(_COLUMNS_OF_A_FILE, console.height)
    return console
