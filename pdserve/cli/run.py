"""`pdserve run`"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import typer

from pdserve.cli.console import Console
from pdserve.cli.options import OWN_CODES_OF_RUN, check_place_options
from pdserve.errors import CommandError, PdserveError, ReportedError, ServeError
from pdserve.operations.launcher_process import ClientCommand
from pdserve.operations.look import choose_destination
from pdserve.operations.plan_recipe import load, recipe_words
from pdserve.operations.submit import JobError, submission, submit_and_follow
from pdserve.operations.up import UpOptions, dry_run, up
from pdserve.plan.render.bash import render_shell

_echo = partial(typer.echo, nl=False)
_IN_SLURM = "--slurm takes nodes of Slurm, {option} {others}: give one of the two"


def run(
    recipe: Path,
    argv: Sequence[str],
    set_: Sequence[str],
    unset: Sequence[str],
    *,
    cluster: Path | None,
    this_machine: bool,
    dry: bool,
) -> None:
    """Raises typer.Exit with the command's code, CommandError, KeyboardInterrupt for a stop that was asked for, and
    other errors of pdserve with codes that are apart from those of commands."""
    check_place_options(cluster, this_machine=this_machine)
    with _own_codes():
        command = ClientCommand(argv, os.environ)
        loaded = load(recipe, set_, unset)
        words = recipe_words(loaded.path, set_, unset)
        there = choose_destination(loaded, cluster, this_machine=this_machine, words=words)
        if dry:
            plan = dry_run(loaded, there, partial(typer.echo, err=True)).plan
            command.check(plan)
            _echo(render_shell(plan) + _then(argv))
            return
        up(loaded, there, Console(stdout=False), UpOptions(command=command))
        code = command.exit_code()
    raise typer.Exit(code)


def run_in_slurm(
    recipe: Path,
    argv: Sequence[str],
    set_: Sequence[str],
    unset: Sequence[str],
    *,
    cluster: Path | None,
    this_machine: bool,
    dry: bool,
) -> None:
    """The whole run as a job, which is followed. The program is looked for on the job's first node: it may be there
    alone. Raises what `run` does, and JobError with the code of the `pdserve run` in the job."""
    if cluster is not None:
        raise typer.BadParameter(_IN_SLURM.format(option="--cluster", others="those of a file"))
    if this_machine:
        raise typer.BadParameter(_IN_SLURM.format(option="--this-machine", others="none of them"))
    with _own_codes():
        job = submission(recipe, set_, unset, argv)
        if dry:
            _echo(job.script)
        else:
            submit_and_follow(job, _echo)


@contextmanager
def _own_codes() -> Iterator[None]:
    """Errors of pdserve get codes that are apart from those of commands."""
    try:
        yield
    except CommandError:
        raise
    except JobError as error:
        if error.has_code:
            raise
        raise ReportedError(error.render(), OWN_CODES_OF_RUN + ServeError.exit_code) from error
    except PdserveError as error:
        raise ReportedError(error.render(), OWN_CODES_OF_RUN + error.exit_code) from error


def _then(argv: Sequence[str]) -> str:
    """What follows the plan, as comments: the deployment is taken down after it."""
    text = shlex.join(argv)
    shown = text if text.isprintable() else repr(text)  # a line break would end the comment
    return f"\n# `pdserve run` then runs this on this machine, and takes the deployment down after it:\n#   {shown}\n"
