"""`pdserve up`: one way for this machine, the hosts of a cluster file and the nodes of a Slurm job."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets as random_secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pdserve.errors import PreflightError, ReportedError, StateError
from pdserve.launch.failure import failure_markdown
from pdserve.launch.launch_record import record_run
from pdserve.operations.client_command import ClientCommand
from pdserve.operations.current_run import check_place, find_running
from pdserve.operations.down import clear_up
from pdserve.operations.launcher_process import end_launcher, follow, run_here, start_detached
from pdserve.operations.look import CheckedPlan, Destination, look
from pdserve.operations.plan_recipe import PlannedRecipe, plan_for
from pdserve.operations.progress import ShownProgress
from pdserve.operations.shown_change import shown_nodes
from pdserve.plan.model import Plan
from pdserve.plan.time_limits import apply_seconds
from pdserve.preflight import resolve_secrets
from pdserve.preflight.container_images import Report
from pdserve.preflight.fabric import Wish
from pdserve.preflight.finding import summarize_warnings
from pdserve.printable import size_text
from pdserve.recipe.load.loader import LoadedRecipe
from pdserve.run.containers import left_of
from pdserve.run.directory import RunDir, check_no_launcher, find, has_living_launcher, home, new_run_id, record_errors
from pdserve.run.inbox import Apply, ask
from pdserve.run.orphans import has_supervisor, list_living, stop_left
from pdserve.run.retention import discard, discard_earlier, keep_failed_look, prune
from pdserve.run.state import DeploymentState
from pdserve.system.host import local_node
from pdserve.system.process import Child
from pdserve.system.stop_signals import hold_stops, let_signals_interrupt


@dataclass(frozen=True)
class UpOptions:
    """Says how a deployment is brought up."""

    detach: bool = False
    """Return once it is ready; its launcher serves on."""
    keep: bool = False
    """Leave what is healthy running when something fails."""
    replace: bool = False
    """Restart running engines whose command has changed."""
    command: ClientCommand | None = None
    """Runs once it is ready, and its end takes the deployment down."""
    on_begin: Callable[[RunDir], None] | None = None
    """Gets a new run once its plan is written and before its launcher starts: what is noted then is there however the
    caller ends."""
    goes_on: bool = False
    """With `detach`: the caller has more to do. A terminal that is closed during the start stops it (else the launcher
    serves on)."""


def up(loaded: LoadedRecipe, there: Destination, show: ShownProgress, options: UpOptions) -> None:
    """Bring a deployment up, or what one that runs lacks. Raises RecipeError, PreflightError, StartError, ServeError,
    StateError and ReportedError, and KeyboardInterrupt for a stop that was asked for before it was ready."""
    root, name = home(os.environ), loaded.recipe.name
    if (run := find_running(root, name)) is not None:
        if options.command is not None:
            raise _runs_already(run, name)
        check_place(run, there.names(loaded.recipe.platform), job=there.job)
        seen = look(loaded, there.machines, run, report=show.note, running=True)
        show.warn(summarize_warnings(seen.findings))
        seen.raise_failed()
        ask_to_apply(run, seen, show, replace=options.replace)
        return
    check_no_orphans(root, name, show.note)
    run = RunDir(root / name / new_run_id())
    with contextlib.ExitStack() as unless_started:
        unless_started.callback(discard, run)
        discard_earlier(run.path.parent)
        if there.machines is not None:
            run.make()  # probes log into it, and every node must see it
            let_signals_interrupt()  # a fetch of an image that has begun is stopped
        seen = _check_before_start(loaded, there, run, show)
        if options.command is not None:
            options.command.check(seen.planned.plan)
        key = random_secrets.token_urlsafe(32)
        secrets = resolve_secrets(seen.planned.plan, os.environ, key)
        run.make()
        plan = seen.planned.plan
        with record_errors(run):
            record_run(run, plan, seen.planned.loaded.to_yaml(model_path=plan.model_path), seen.planned.versions)
        unless_started.pop_all()
    _bring_up(run, plan, key, secrets, show, options)


def _runs_already(run: RunDir, name: str) -> StateError:
    return StateError(
        f"{name} is running already",
        where=str(run.path),
        cause="`pdserve run` brings a deployment up for its command alone, and takes it down after it",
        todo=f"pdserve down {name}, or another name for this deployment: --set name={name}-2; or give the command the "
        f"endpoint of `pdserve status {name}`",
    )


def dry_run(loaded: LoadedRecipe, there: Destination, report: Report) -> PlannedRecipe:
    """Return the plan for where the recipe would go. Other machines are looked at, and nothing is left there but the
    image of the container, through which they are looked at."""
    if there.machines is None:
        return plan_for(loaded, [local_node(loaded.recipe.platform)], run_dir="run", run_id="dry-run")
    seen = look(loaded, there.machines, None, report=report).planned
    nodes = shown_nodes(loaded, there.machines, seen.plan.nodes)
    return plan_for(loaded, nodes, run_dir="run", run_id="dry-run", versions=seen.versions)


def recorded_recipe(root: Path) -> Path:
    """Return the recipe of the one deployment that there is, for an `up` that names none. Raises StateError."""
    return find(root, None).recipe


def check_no_orphans(root: Path, name: str, report: Report) -> None:
    """Wait until the supervisors of the last run, whose launcher is gone, have stopped what it left.

    Raises StateError when another launcher holds the lock, which a detached one could write to its log only; or when
    processes of the last run still hold devices, memory and ports, and no supervisor of it was there to stop them."""
    check_no_launcher(root, name)
    try:
        run = find(root, name)
        state = run.read_state()
    except StateError:
        return
    _check_no_containers(run, state)
    if has_supervisor(state):
        report(f"{name}: the launcher of its last run is gone; waiting until its agents have stopped what it left")
        asyncio.run(clear_up(state, run, report))
    if left := list_living(state, run):
        raise StateError(
            f"{len(left)} process(es) of the last run of {name} still live",
            where=str(run.path),
            cause="launcher, agent and guard were all killed at once, or the processes cannot be stopped",
            todo=f"pdserve down {name}",
            evidence=tuple(left),
        )
    asyncio.run(stop_left(state, run))


def _check_no_containers(run: RunDir, state: DeploymentState) -> None:
    try:
        plan = run.read_plan()
    except StateError:
        return
    if left := asyncio.run(left_of(plan, state, run)):
        raise StateError(
            f"{len(left)} container(s) of the last run of {plan.name} still run",
            where=str(run.path),
            cause="its launcher was killed, or lost them; their agents stop what is in them",
            todo=f"pdserve down {plan.name}",
            evidence=left,
        )


def _check_before_start(loaded: LoadedRecipe, there: Destination, run: RunDir, show: ShownProgress) -> CheckedPlan:
    try:
        seen = look(loaded, there.machines, run, report=show.note, fabric=_fabric(loaded))
    except PreflightError as error:
        if there.machines is not None:  # it names a log of the run
            keep_failed_look(run, failure_markdown(error, loaded.recipe.name, None, ()))
        raise
    show.warn([*loaded.warnings, *there.warnings, *seen.planned.plan.warnings, *summarize_warnings(seen.findings)])
    if there.machines is not None:
        show.note(f"{there.machines.origin}: {len(there.machines.machines)} node(s)", *seen.nodes)
    seen.raise_failed()
    return seen


def _fabric(loaded: LoadedRecipe) -> Wish | None:
    """Return what the fabric check is to try; None: the recipe does without, or its own command may run anything."""
    recipe = loaded.recipe
    if not recipe.fabric.check or recipe.engine.command:
        return None
    return Wish(python=recipe.engine.python, min_gbps=recipe.fabric.min_gbps)


def _bring_up(
    run: RunDir,
    plan: Plan,
    key: str,
    secrets: Mapping[str, str],
    show: ShownProgress,
    options: UpOptions,
) -> None:
    let_signals_interrupt()
    launcher: Child | None = None
    ended_well = interrupted = False
    try:
        with record_errors(run):
            run.save_key(key)
        if options.on_begin is not None:
            options.on_begin(run)
        show.begin(run, plan, serves_here=not options.detach)
        _prune(run, plan, show)
        if options.detach:
            with hold_stops(), record_errors(run):
                launcher = start_detached(run, keep=options.keep)
            follow(run, launcher, show.event, keep=options.keep, goes_on=options.goes_on)
        else:
            run_here(run, plan, secrets, show.event, keep=options.keep, command=options.command)
        ended_well = True
    except KeyboardInterrupt:
        interrupted = True
        if launcher is not None:
            end_launcher(launcher)
        raise
    finally:
        if not ended_well:
            _forget_unstarted(run, launcher, interrupted=interrupted)
        if not options.detach:
            show.end(detached=False)
    if options.detach:
        show.end(detached=True)


def _forget_unstarted(run: RunDir, launcher: Child | None, *, interrupted: bool) -> None:
    with hold_stops():
        # A living launcher needs the key, also one that keeps what is healthy after a failure. One that was killed, or
        # was still importing when the stop came, has not removed it.
        ended = launcher is None or launcher.poll() is not None
        if ended:
            run.forget_key()
        if (launcher is None or (interrupted and ended)) and not run.state.exists():
            discard(run)  # no launcher has begun; of one that failed to, the log is there to be read


def _prune(run: RunDir, plan: Plan, show: ShownProgress) -> None:
    removed = prune(run.path.parent, plan.retention)
    show.warn(
        f"the old run {old_run.path} stays: {old_run.problem}" for old_run in removed if old_run.problem is not None
    )
    if gone := [old_run for old_run in removed if old_run.problem is None]:
        show.note(f"{len(gone)} old run(s) removed, {size_text(sum(old_run.size for old_run in gone))} (`retention`)")


def ask_to_apply(run: RunDir, seen: CheckedPlan, show: ShownProgress, *, replace: bool) -> None:
    """Ask the launcher of `run`, and show what it does. `replace`: also engines whose command has changed. Raises
    ReportedError with the launcher's own exit code when it refuses or fails."""
    planned = seen.planned
    launcher = run.read_state().launcher
    show.result(f"{planned.plan.name} is running (launcher PID {launcher.pid}); changing it while it serves")
    _, offset = run.read_events()

    def show_events() -> None:
        nonlocal offset
        events, offset = run.read_events(offset)
        for event in events:
            show.event(event)

    reply = ask(
        run,
        Apply(
            plan=planned.plan,
            recipe=planned.loaded.to_yaml(model_path=planned.plan.model_path),
            versions=planned.versions,
            replace=replace,
        ),
        seconds=apply_seconds(run.read_plan(), planned.plan),
        alive=lambda: has_living_launcher(run, run.read_state()),
        look=show_events,
    )
    show_events()
    if reply.exit_code:
        raise ReportedError(reply.message, reply.exit_code)
    show.result(reply.message)
