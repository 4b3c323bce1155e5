"""`pdserve up` and `run`, here and by Slurm. Apart from verbs/deployment.py for a fast --help."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import typer

from pdserve.cli.console import show_plan
from pdserve.cli.options import OWN_CODES_OF_RUN, check_place_options
from pdserve.errors import CommandError, PdserveError, ReportedError, ServeError
from pdserve.operations.client_command import ClientCommand
from pdserve.operations.look import choose_destination
from pdserve.operations.plan_recipe import load, recipe_words
from pdserve.operations.progress import ShownProgress
from pdserve.operations.shown_change import change_there
from pdserve.operations.submit import JobError, submission, submit_and_follow
from pdserve.operations.up import UpOptions, dry_run, recorded_recipe, up
from pdserve.plan.bash import render_shell
from pdserve.printable import printable
from pdserve.run.directory import home


def run_up(
    recipe: Path | None,
    set_: Sequence[str],
    unset: Sequence[str],
    options: UpOptions,
    *,
    dry: bool,
    as_json: bool,
    cluster: Path | None,
    this_machine: bool,
) -> None:
    """Load a recipe, choose its machines, and bring it up; `dry`: print the plan. Raises as `operations.up` does."""
    check_place_options(cluster, this_machine=this_machine)
    if as_json and not dry:
        raise typer.BadParameter("--json belongs to --dry-run")
    loaded = load(recipe or recorded_recipe(home(os.environ)), set_, unset)
    words = recipe_words(loaded.path, set_, unset)
    there = choose_destination(loaded, cluster, this_machine=this_machine, words=words)
    if dry:
        plan, change = change_there(loaded, there, _progress) or (dry_run(loaded, there, _progress).plan, None)
        show_plan(plan, change, as_json=as_json, replace=options.replace)
        return
    up(loaded, there, ShownProgress(), options)


def _progress(line: str) -> None:
    """Print progress on stderr, beside the plan on stdout."""
    typer.echo(printable(line), err=True)


_echo = partial(typer.echo, nl=False)
_IN_SLURM = "--slurm takes nodes of Slurm, {option} {others}: give one of the two"


def run_command(
    recipe: Path,
    argv: Sequence[str],
    set_: Sequence[str],
    unset: Sequence[str],
    *,
    cluster: Path | None,
    this_machine: bool,
    dry: bool,
) -> None:
    """Bring a deployment up, run a command beside it and exit with its code. Raises typer.Exit with that code,
    CommandError, KeyboardInterrupt for a stop that was asked for, and other errors of pdserve with codes that are apart
    from those of commands."""
    check_place_options(cluster, this_machine=this_machine)
    with _own_codes():
        command = ClientCommand(argv, os.environ)
        loaded = load(recipe, set_, unset)
        words = recipe_words(loaded.path, set_, unset)
        there = choose_destination(loaded, cluster, this_machine=this_machine, words=words)
        if dry:
            plan = dry_run(loaded, there, _progress).plan
            command.check(plan)
            _echo(render_shell(plan) + _steps_after(argv))
            return
        up(loaded, there, ShownProgress(stdout=False), UpOptions(command=command))
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
    """Run the whole as a job, and follow it. The program is looked for on the job's first node: it may be there alone.
    Raises what `run_command` does, and JobError with the code of the `pdserve run` in the job."""
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
    """Give errors of pdserve codes that are apart from those of commands."""
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


def _steps_after(argv: Sequence[str]) -> str:
    """Return what follows the plan, as comments: the deployment is taken down after it."""
    text = shlex.join(argv)
    shown = text if text.isprintable() else repr(text)  # a line break would end the comment
    return f"\n# `pdserve run` then runs this on this machine, and takes the deployment down after it:\n#   {shown}\n"


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


def submit_up(
    recipe: Path | None, set_: Sequence[str], unset: Sequence[str], *, detach: bool, refused: Mapping[str, bool]
) -> None:
    """Submit the job of a recipe, and follow it. `refused`: option that does not go with --slurm -> whether it was
    typed. Raises BadParameter for those, and what `operations.submit` does."""
    for option, typed in refused.items():
        if typed:
            raise typer.BadParameter(_AGAINST[option].format(recipe=recipe or "RECIPE"))
    if recipe is None:
        raise typer.BadParameter("--slurm submits the job of a recipe: type `pdserve up RECIPE --slurm`")
    submit_and_follow(submission(recipe, set_, unset), _echo, detach=detach)
