"""`pdserve up --slurm`"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import typer

from pdserve.operations.submit import submission, submit_and_follow

_AGAINST = {
    "--dry-run": "--slurm submits the job, --dry-run starts nothing: `pdserve render {recipe} --slurm` prints the "
    "script",
    "--cluster": "--slurm takes nodes of Slurm, --cluster those of a file: give one of the two",
    "--this-machine": "--slurm takes nodes of Slurm, --this-machine none of them: give one of the two",
    "--replace": "--slurm submits a new job, --replace changes a deployment that runs: inside its job, "
    "`pdserve up {recipe} --replace`",
    "--keep-on-failure": "the job of --slurm is over when its deployment fails, so that --keep-on-failure keeps "
    "nothing: `salloc`, and `pdserve up {recipe} --keep-on-failure` inside",
}
"""Option that does not go with --slurm -> why not, and what to type."""


def run(
    recipe: Path | None, set_: Sequence[str], unset: Sequence[str], *, detach: bool, refused: Mapping[str, bool]
) -> None:
    """`refused`: option that does not go with --slurm -> whether it was typed. Raises BadParameter for those, and what
    `operations.submit` does."""
    for option, typed in refused.items():
        if typed:
            raise typer.BadParameter(_AGAINST[option].format(recipe=recipe or "RECIPE"))
    if recipe is None:
        raise typer.BadParameter("--slurm submits the job of a recipe: type `pdserve up RECIPE --slurm`")
    submit_and_follow(submission(recipe, set_, unset), partial(typer.echo, nl=False), detach=detach)
