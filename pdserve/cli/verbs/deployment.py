"""Verbs that start, stop, show and watch a deployment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdserve.cli.options import (
    ClusterOption,
    JsonOption,
    NameArgument,
    RecipeArgument,
    SetOption,
    ThisMachineOption,
    UnsetOption,
)

verbs = typer.Typer()


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
        from pdserve.cli.up import submit_up

        refused = {"--dry-run": dry_run, "--cluster": cluster is not None, "--this-machine": this_machine}
        refused |= {"--replace": replace, "--keep-on-failure": keep_on_failure, "--json": json_}
        submit_up(recipe, set_ or [], unset or [], detach=detach, refused=refused)
        return
    from pdserve.cli.up import run_up as run
    from pdserve.operations.up import UpOptions

    run(
        recipe,
        set_ or [],
        unset or [],
        UpOptions(detach=detach, keep=keep_on_failure, replace=replace),
        dry=dry_run,
        as_json=json_,
        cluster=cluster,
        this_machine=this_machine,
    )


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
    from pdserve.cli.up import run_command, run_in_slurm

    verb = run_in_slurm if slurm else run_command
    verb(recipe, command, set_ or [], unset or [], cluster=cluster, this_machine=this_machine, dry=dry_run)


@verbs.command()
def down(name: NameArgument = None) -> None:
    """Stop a deployment in order: proxy (drained), decode, prefill, LMCache."""
    from pdserve.operations.down import down as stop_deployment

    stop_deployment(name, typer.echo)


@verbs.command()
def status(
    name: NameArgument = None,
    json_: JsonOption = False,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Go on until Ctrl-C, with what happened in the last minute.")
    ] = False,
    interval: Annotated[
        float | None,
        typer.Option("--interval", min=0.5, metavar="SECONDS", help="With --watch: every 2 s unless given."),
    ] = None,
) -> None:
    """Show the state of every process, and what the engines report. Exit 5 when degraded or failed.

    With --watch: on a terminal a table that is redrawn, otherwise plain lines, with --json a line of JSON each time.
    """
    if watch:
        from pdserve.cli.status import run_watch

        run_watch(name, as_json=json_, interval=2.0 if interval is None else interval)
        return
    if interval is not None:
        raise typer.BadParameter("--interval belongs to --watch")
    from pdserve.cli.status import run_status as run

    run(name, as_json=json_)


@verbs.command()
def monitoring(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the files; made if it is not there.")],
    recipe: Annotated[
        Path | None,
        typer.Argument(
            help="The recipe, if it takes one node; without one, the plan of a deployment.", show_default=False
        ),
    ] = None,
    deployment: Annotated[
        str | None, typer.Option("--deployment", metavar="NAME", help="The deployment, if there are several.")
    ] = None,
    node: Annotated[
        str | None, typer.Option("--node", help="The node that Prometheus runs on; that of the proxy unless given.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that have other contents.")] = False,
    set_: SetOption = None,
    unset: UnsetOption = None,
) -> None:
    """Write prometheus.yml, alerts.yml and Grafana's dashboard.json for a deployment.

    Prometheus gets every /metrics that it reaches from its node: those of the proxy, the engines, and LMCache there.
    """
    from pdserve.cli.monitoring import run

    run(recipe, set_ or [], unset or [], deployment=deployment, node=node, out=out, force=force)


@verbs.command()
def logs(
    process: Annotated[str | None, typer.Argument(help="A process (prefill-0); all of them without it.")] = None,
    name: Annotated[str | None, typer.Option("--deployment", help="The deployment, if there are several.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as the logs grow.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Last lines of each log.")] = 80,
) -> None:
    """Print the logs of a deployment, or of one process of it."""
    from pdserve.cli.logs import run

    run(process, name, follow=follow, lines=lines)


@verbs.command()
def restart(
    process: Annotated[str, typer.Argument(help="The process: prefill-0, lmcache-0, proxy, ...")],
    name: Annotated[str | None, typer.Option("--deployment", help="The deployment, if there are several.")] = None,
) -> None:
    """Stop one process of a running deployment and start it again."""
    from pdserve.operations.restart import restart as restart_process

    typer.echo(restart_process(process, name))
