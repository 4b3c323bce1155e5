"""`pdserve up`"""

from __future__ import annotations

import asyncio
import os
import secrets as random_secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace as changed
from functools import partial
from pathlib import Path

import typer

from pdserve import procfs
from pdserve.candidates import Candidates
from pdserve.change import change_of
from pdserve.cli.console import Console
from pdserve.cli.interpreters import as_running
from pdserve.cli.listing import mebibytes
from pdserve.cli.plan_recipe import Planned, load, located, plan_for
from pdserve.cli.render import recipe_words
from pdserve.cli.where import candidates, look, look_here, look_once
from pdserve.control import Apply, ask
from pdserve.errors import PdserveError, StateError
from pdserve.failure_report import report
from pdserve.host import local_node
from pdserve.leftovers import living, stop_left, supervised
from pdserve.plan.model import Plan
from pdserve.plan.reach import Srun
from pdserve.plan.render import render_shell
from pdserve.preflight import resolve_secrets
from pdserve.preflight.finding import raise_failed, strange
from pdserve.preflight.memory import given_back
from pdserve.process import Child
from pdserve.recipe.loader import LoadedRecipe
from pdserve.record import record_run
from pdserve.retention import prune
from pdserve.rundir import RunDir, check_no_launcher, find, home, lives, new_run_id
from pdserve.running import end_launcher, follow, held_back, interruptible, run_here, start_detached

_APPLY_MARGIN_SECONDS = 120.0


def run(
    recipe: Path | None,
    set_: Sequence[str],
    unset: Sequence[str],
    *,
    detach: bool,
    keep: bool,
    dry_run: bool,
    replace: bool,
    cluster: Path | None,
    this_machine: bool,
) -> None:
    """Raises RecipeError, PreflightError, StartError, ServeError."""
    began = _process_start()
    root = home(os.environ)
    loaded = load(recipe or find(root, None).recipe, set_, unset)
    words = recipe_words(loaded.path, set_, unset)
    there, warnings = candidates(loaded, cluster, this_machine=this_machine, words=words)
    if dry_run:
        typer.echo(render_shell(_dry(loaded, there).plan), nl=False)
        return
    if there is not None:
        _many(loaded, there, root, warnings, detach=detach, keep=keep, replace=replace, began=began)
        return
    node = local_node(loaded.recipe.platform)
    if (running := _running(root, loaded.recipe.name)) is not None:
        _check_place(running, [node.name], job=None)
        planned = _as_running(running, plan_for(loaded, [node], run_dir=str(running.path), run_id=running.run_id))
        _check_changes(running, planned)
        _apply(running, planned, replace=replace)
        return
    _check_leftovers(root, loaded.recipe.name)
    run_id = new_run_id()
    run_dir = root / loaded.recipe.name / run_id
    planned = plan_for(loaded, [node], run_dir=str(run_dir), run_id=run_id)
    console = Console(planned.plan)
    findings = look_here(planned)
    console.warn([*loaded.warnings, *planned.plan.warnings, *strange(findings)])
    with located(loaded):
        raise_failed(findings)
    key = random_secrets.token_urlsafe(32)
    secrets = resolve_secrets(planned.plan, os.environ, key)
    run = RunDir.create(root, loaded.recipe.name, run_id)
    _bring_up(run, planned, key, secrets, console, detach=detach, keep=keep, began=began)


def _dry(loaded: LoadedRecipe, there: Candidates | None) -> Planned:
    """The plan for where it would go. Other machines are looked at, and nothing is left there."""
    if there is None:
        return plan_for(loaded, [local_node(loaded.recipe.platform)], run_dir="run", run_id="dry-run")
    seen = look_once(loaded, there).planned
    python = there.machines[0].command[-1]
    return plan_for(loaded, seen.plan.nodes, run_dir="run", run_id="dry-run", versions=seen.versions, python=python)


def _many(
    loaded: LoadedRecipe,
    there: Candidates,
    root: Path,
    warnings: Sequence[str],
    *,
    detach: bool,
    keep: bool,
    replace: bool,
    began: float,
) -> None:
    """On other machines: all are looked at before anything starts, into the run directory that they share."""
    if (running := _running(root, loaded.recipe.name)) is not None:
        _check_place(running, [one.name for one in there.machines], job=there.job)
        seen = look(loaded, there, running, over=partial(_as_running, running))
        with located(loaded, there.file):
            raise_failed(seen.findings)
        _apply(running, seen.planned, replace=replace)
        return
    _check_leftovers(root, loaded.recipe.name)
    run = RunDir.create(root, loaded.recipe.name, new_run_id())
    try:
        seen = look(loaded, there, run)
        console = Console(seen.planned.plan)
        console.warn([*loaded.warnings, *warnings, *seen.planned.plan.warnings, *strange(seen.findings)])
        console.say(f"{there.origin}: {len(there.machines)} node(s)", *seen.addresses)
        with located(loaded):
            raise_failed(seen.findings)
        key = random_secrets.token_urlsafe(32)
        secrets = resolve_secrets(seen.planned.plan, os.environ, key)
    except PdserveError as error:
        run.write(run.failure, report(error, loaded.recipe.name, None, ()))
        raise
    _bring_up(run, seen.planned, key, secrets, console, detach=detach, keep=keep, began=began)


def _bring_up(
    run: RunDir,
    planned: Planned,
    key: str,
    secrets: Mapping[str, str],
    console: Console,
    *,
    detach: bool,
    keep: bool,
    began: float,
) -> None:
    record_run(run, planned.plan, planned.loaded.to_yaml(model_path=planned.plan.model_path), planned.versions)
    interruptible()
    launcher: Child | None = None
    try:
        run.save_key(key)
        console.begin(run)
        _prune(run, planned.plan, console)
        if detach:
            with held_back():
                launcher = start_detached(run, keep=keep)
            follow(run, launcher, console.tell, keep=keep)
        else:
            run_here(run, planned.plan, secrets, console.tell, keep=keep, began=began)
    except KeyboardInterrupt:
        if launcher is not None:
            end_launcher(launcher)
        raise
    finally:
        # A launcher that lives needs it, as one that keeps what is healthy of a failure; one that was killed, or was
        # still importing when it was told to stop, has not forgotten it.
        if launcher is None or launcher.poll() is not None:
            run.forget_key()
        if not detach:
            console.end()
    if detach:
        console.detached()


def _prune(run: RunDir, plan: Plan, console: Console) -> None:
    removed = prune(run.path.parent, plan.retention)
    console.warn(f"the old run {one.path} stays: {one.problem}" for one in removed if one.problem is not None)
    if gone := [one for one in removed if one.problem is None]:
        console.say(f"{len(gone)} old run(s) removed, {mebibytes(sum(one.size for one in gone))} (`retention`)")


def _running(root: Path, name: str) -> RunDir | None:
    """The current run of that name, if its launcher lives."""
    try:
        run = find(root, name)
        return run if lives(run, run.read_state()) else None
    except StateError:
        return None


def _check_leftovers(root: Path, name: str) -> None:
    """StateError: somebody holds the lock, which a detached launcher could say in its log only; or of the last run,
    whose supervisors are all gone, something still lives here: it has devices, memory and ports that the new one
    needs."""
    check_no_launcher(root, name)
    try:
        run = find(root, name)
        state = run.read_state()
    except StateError:
        return
    if supervised(state):
        return
    if left := living(state, run):
        raise StateError(
            f"{len(left)} process(es) of the last run of {name} still live",
            where=str(run.path),
            cause="launcher, agent and guard were all killed at once",
            todo=f"pdserve down {name}",
            evidence=tuple(left),
        )
    asyncio.run(stop_left(state, run))


def _check_place(run: RunDir, nodes: Sequence[str], *, job: str | None) -> None:
    """What runs elsewhere under this name is not changed from here: a second job of a recipe is a second deployment."""
    plan = run.read_plan()
    theirs = next((node.reach.job for node in plan.nodes if isinstance(node.reach, Srun)), None)
    there = [node.name for node in plan.nodes]
    if (theirs, sorted(there)) == (job, sorted(nodes)):
        return
    where = ", ".join(there) + (f" (job {theirs})" if theirs is not None else "")
    raise StateError(
        f"{plan.name} is running on {where}, and this is {', '.join(nodes)}" + (f" (job {job})" if job else ""),
        where=str(run.path),
        cause="deployments are told apart by their name, which the recipe gives",
        todo=f"another name for this one: --set name={plan.name}-2; or pdserve down {plan.name} first",
    )


def _as_running(run: RunDir, planned: Planned) -> Planned:
    plan, changes = as_running(run.read_plan(), planned.plan)
    for change in changes:
        typer.echo(change)
    return changed(planned, plan=plan)


def _check_changes(run: RunDir, planned: Planned) -> None:
    """The preflight of what would be started or replaced, before anything that runs is stopped for it."""
    plan = planned.plan
    change = change_of(run, plan)
    (node,) = (one.name for one in plan.nodes)
    back = given_back(run.read_plan(), node, change.replaced)
    findings = look_here(planned, starting=change.starting, held_by_us=change.ports[node], gives_back=back)
    for warning in strange(findings):
        typer.echo(f"warning: {warning}", err=True)
    with located(planned.loaded):
        raise_failed(findings)


def _apply(run: RunDir, planned: Planned, *, replace: bool) -> None:
    launcher = run.read_state().launcher
    timeouts = planned.plan.timeouts
    typer.echo(f"{planned.plan.name} is running (launcher PID {launcher.pid}); starting what is missing")
    reply = ask(
        run,
        Apply(plan=planned.plan, recipe=planned.loaded.to_yaml(model_path=planned.plan.model_path), replace=replace),
        seconds=timeouts.lmcache_seconds + timeouts.engine_seconds + _APPLY_MARGIN_SECONDS,
        alive=lambda: lives(run, run.read_state()),
    )
    if reply.exit_code:
        typer.echo(f"error: {reply.message}", err=True)
        raise typer.Exit(reply.exit_code)
    typer.echo(reply.message)


def _process_start() -> float:
    """time.monotonic() at which this command was started, interpreter and imports included."""
    identity = procfs.identify(os.getpid())
    assert identity is not None
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - identity.start_ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - max(0.0, age)
