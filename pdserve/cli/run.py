"""Verbs that start, change and stop a deployment: `up`, `run`, `down`, `restart`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from pdserve.cli.options import (
    OWN_CODES_OF_RUN,
    ClusterOption,
    NameArgument,
    RecipeArgument,
    SetOption,
    ThisMachineOption,
    UnsetOption,
    load_and_place,
)
from pdserve.cli.output import VerbOutput
from pdserve.errors import CommandError, PdserveError, ReportedError, ServeError, StateError

verbs = typer.Typer()
_echo = partial(typer.echo, nl=False)


@verbs.command()
def up(
    recipe: Annotated[
        Path | None, typer.Argument(help="The recipe; without one, what the running deployment lacks is started.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once it is ready; it serves on.")] = False,
    keep_on_failure: Annotated[
        bool, typer.Option("--keep-on-failure", help="Leave what is healthy running when something fails.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be started, restarted and stopped, and do nothing.")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="With --dry-run: as JSON.")] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Also restart running engines whose command has changed.")
    ] = False,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="Submit the recipe's job to Slurm from here, wait for it and follow it.")
    ] = False,
    cluster: ClusterOption = None,
    this_machine: ThisMachineOption = False,
    set_: SetOption = None,
    unset: UnsetOption = None,
) -> None:
    """Bring a deployment up: LMCache, engines, proxy; prove it with a token; serve until Ctrl-C.

    Inside a Slurm job it uses the job's nodes, with --cluster those of a file, otherwise this machine.
    """
    if slurm:
        _check_with_slurm("--dry-run", dry_run, "starts nothing: `pdserve render RECIPE --slurm` prints the script")
        _check_place_with_slurm(cluster, this_machine=this_machine)
        _check_with_slurm("--replace", replace, "changes one that runs: inside its job, `pdserve up RECIPE --replace`")
        _check_with_slurm("--keep-on-failure", keep_on_failure, "keeps nothing: type `pdserve up` in salloc")
        _check_with_slurm("--json", json_, "belongs to --dry-run")
        if recipe is None:
            raise typer.BadParameter("--slurm submits the job of a recipe: type `pdserve up RECIPE --slurm`")
        from pdserve.operations.submit import submission, submit_and_follow

        submit_and_follow(submission(recipe, set_ or [], unset or []), _echo, detach=detach)
        return
    from pdserve.cli.recipe import show_plan
    from pdserve.operations import up as operation
    from pdserve.operations.progress import ShownProgress
    from pdserve.operations.shown_change import change_there
    from pdserve.run.directory import home

    if json_ and not dry_run:
        raise typer.BadParameter("--json belongs to --dry-run")
    file = recipe or operation.recorded_recipe(home(os.environ))
    loaded, there = load_and_place(file, set_, unset, cluster, this_machine=this_machine)
    if dry_run:
        report = VerbOutput(stderr=True).line
        plan, change = change_there(loaded, there, report) or (operation.dry_run(loaded, there, report).plan, None)
        show_plan(plan, change, as_json=json_, replace=replace)
        return
    options = operation.UpOptions(detach=detach, keep=keep_on_failure, replace=replace)
    operation.up(loaded, there, ShownProgress(), options)


def _check_with_slurm(option: str, typed: bool, why: str) -> None:
    if typed:
        raise typer.BadParameter(f"--slurm submits a job, and {option} {why}")


def _check_place_with_slurm(cluster: Path | None, *, this_machine: bool) -> None:
    _check_with_slurm("--cluster", cluster is not None, "takes the nodes of a file: give one of the two")
    _check_with_slurm("--this-machine", this_machine, "takes no other one: give one of the two")


@verbs.command("run")
def run_(
    recipe: RecipeArgument,
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="The command and its arguments, after `--`.")],
    slurm: Annotated[
        bool, typer.Option("--slurm", help="Submit all of it to Slurm as a job from here, wait for it and follow it.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be started (with --slurm: the script), start nothing.")
    ] = False,
    cluster: ClusterOption = None,
    this_machine: ThisMachineOption = False,
    set_: SetOption = None,
    unset: UnsetOption = None,
) -> None:
    """Bring a deployment up, run a command against it, take it down. Exit with the command's code.

    The command runs here, with the proxy's URL (without /v1) in PDSERVE_ENDPOINT, the model's name in PDSERVE_MODEL and
    a key in PDSERVE_API_KEY. Its output is forwarded; pdserve's own goes to stderr. Whatever ends first, the deployment
    is taken down: also after Ctrl-C, a TERM, or a death in the deployment, which ends the command. Codes of pdserve's
    own errors are 200 + those of the other verbs. With --slurm the command runs on the first node of the job, in the
    folder from which that was submitted, and all output is that of the job.
    """
    if slurm:
        from pdserve.operations.submit import submission, submit_and_follow

        _check_place_with_slurm(cluster, this_machine=this_machine)
        with _own_codes():
            job = submission(recipe, set_ or [], unset or [], command)
            if dry_run:
                _echo(job.script)
            else:
                submit_and_follow(job, _echo)  # the program may be on the job's first node alone: it is sought there
        return
    from pdserve.operations import up as operation
    from pdserve.operations.client_command import ClientCommand
    from pdserve.operations.progress import ShownProgress
    from pdserve.plan.bash import render_shell

    with _own_codes():
        client = ClientCommand(command, os.environ)
        loaded, there = load_and_place(recipe, set_, unset, cluster, this_machine=this_machine)
        if dry_run:
            plan = operation.dry_run(loaded, there, VerbOutput(stderr=True).line).plan
            client.check(plan)
            _echo(render_shell(plan) + _steps_after(command))
            return
        operation.up(loaded, there, ShownProgress(stdout=False), operation.UpOptions(command=client))
        code = client.exit_code()
    raise typer.Exit(code)


@contextmanager
def _own_codes() -> Iterator[None]:
    """Give errors of pdserve codes that are apart from those of commands."""
    from pdserve.operations.submit import JobError

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


@verbs.command()
def down(name: NameArgument = None) -> None:
    """Stop a deployment in order: proxy (drained), decode, prefill, LMCache."""
    from pdserve.operations.down import down as stop_deployment

    stop_deployment(name, typer.echo)


@verbs.command()
def restart(
    process: Annotated[str, typer.Argument(help="The process: prefill-0, lmcache-0, proxy, ...")],
    name: Annotated[str | None, typer.Option("--deployment", help="The deployment, if there are several.")] = None,
) -> None:
    """Stop one process of a running deployment and start it again."""
    from pdserve.plan.time_limits import restart_seconds
    from pdserve.run.directory import find, has_living_launcher, home
    from pdserve.run.inbox import Restart, ask

    run = find(home(os.environ), name)
    state, plan = run.read_state(), run.read_plan()
    if not has_living_launcher(run, state):
        raise StateError(f"{state.name} is not running", todo="pdserve up")
    seconds = restart_seconds(plan, process)
    reply = ask(run, Restart(name=process), seconds=seconds, alive=lambda: has_living_launcher(run, run.read_state()))
    if reply.exit_code:
        raise ReportedError(reply.message, reply.exit_code)
    typer.echo(reply.message)
