"""`pdserve restart`"""

from __future__ import annotations

import typer

from pdserve.operations.restart import restart


def run(process: str, name: str | None) -> None:
    """Raises what `operations.restart` does."""
    typer.echo(restart(process, name))
