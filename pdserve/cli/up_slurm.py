"""`pdserve up --slurm`"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import typer

from pdserve.operations.submit import submit_and_follow


def run(recipe: Path, set_: Sequence[str], unset: Sequence[str], *, detach: bool) -> None:
    """Raises what `operations.submit` does."""
    submit_and_follow(recipe, set_, unset, partial(typer.echo, nl=False), detach=detach)
