"""`pdserve down`"""

from __future__ import annotations

import typer

from pdserve.operations.down import down


def run(name: str | None) -> None:
    """Raises what `operations.down` does."""
    down(name, typer.echo)
