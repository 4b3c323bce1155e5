"""`pdserve verify` and `eval`. Apart from verbs/proofs.py for a fast --help."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pdserve.errors import StateError
from pdserve.evaluation import EvalSettings, Score, evaluate, find_harness
from pdserve.observe.remote_http import client, seen_from_here
from pdserve.operations.progress import event_text
from pdserve.operations.serving import check_host
from pdserve.plan.model import Plan
from pdserve.run.directory import RunDir, find, has_living_launcher, home
from pdserve.run.history import INCIDENTS
from pdserve.run.state import DeploymentState
from pdserve.system.stop_signals import run_to_its_end
from pdserve.verify import Report, run_proofs
from pdserve.verify.load import LoadOptions, LoadReport, LoadWindow, run_load
from pdserve.verify.load.traffic import ENDINGS, SentWindow

_RECORDED_SECONDS = 1.0
_COLUMNS = ("requests", "until second", "answered", "cancelled", "failed", "differ")
_STYLES = {"proven": "green", "failed": "bold red", "not-proven": "yellow"}


def run_verify(name: str | None, *, as_json: bool, load: LoadOptions | None = None) -> None:
    """Prints every proof with its numbers. Raises VerifyError or NotProvenError after that. `load`: prove it under
    load."""
    run_dir, state, plan = find_serving(name, "verify")
    _, began = run_dir.read_events()
    report = asyncio.run(_prove(run_dir, state, plan, load))
    report = report.model_copy(update={"meanwhile": _meanwhile(run_dir, began, failed=bool(report.having("failed")))})
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2))
    elif sys.stdout.isatty():
        _table(report)
    else:
        _print_lines(report)
    report.raise_for_status()


def load_options(typed: Mapping[str, int | float | None], *, load: bool) -> LoadOptions | None:
    """Return the options of a load; None: no load was asked for. `typed`: field of LoadOptions -> what was typed.
    Raises BadParameter for options without --load."""
    given = {name: value for name, value in typed.items() if value is not None}
    if not load:
        if given:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise typer.BadParameter(f"{options}: only with --load")
        return None
    until = {} if "requests" in given or "seconds" not in given else {"requests": None}
    return replace(LoadOptions(), **until, **given)  # type: ignore[arg-type]


async def _prove(run_dir: RunDir, state: DeploymentState, plan: Plan, load: LoadOptions | None) -> Report:
    seen, key = seen_from_here(plan, state), run_dir.read_key()
    async with client(run_dir, state) as everywhere:
        if load is None:
            return await run_proofs(seen, engine_key=key, client=everywhere)
        return await run_load(seen, load, engine_key=key, client=everywhere, on_window=_progress)


def _meanwhile(run_dir: RunDir, began: int, *, failed: bool) -> tuple[str, ...]:
    """Return what went wrong in the deployment since a byte of its history, a line an event. A request fails a moment
    before the launcher has recorded the death that is its cause: after a failure that moment is waited for."""
    until = time.monotonic() + (_RECORDED_SECONDS if failed else 0.0)
    while True:
        events, _ = run_dir.read_events(began)
        texts = [text for event in events if event["event"] in INCIDENTS and (text := event_text(event))]
        if texts or time.monotonic() >= until:
            return tuple(" ".join(text.split()) for text in texts)
        time.sleep(0.05)


def _progress(window: SentWindow) -> None:
    """Print a line for a window of the load, apart from the report: a load takes minutes."""
    counts = ", ".join(f"{len(window.ended(how))} {how}" for how in ENDINGS)
    typer.echo(f"requests {window.first}-{window.last}: {counts}, {window.seconds:g} s", err=True)


def _numbers(numbers: Mapping[str, object]) -> str:
    return " ".join(f"{key}={value}" for key, value in numbers.items())


def _table(report: Report) -> None:
    table = Table("proof", "status", "claim", "numbers", header_style="bold")
    for proof in report.proofs:
        text = proof.claim if not proof.reason else f"{proof.claim}\n{proof.reason}"
        table.add_row(proof.name, Text(proof.status, style=_STYLES[proof.status]), text, _numbers(proof.numbers))
    Console().print(table)
    if isinstance(report, LoadReport) and report.windows:
        windows = Table(*_COLUMNS, header_style="bold")
        for window in report.windows:
            windows.add_row(*_cells(window))
        Console().print(windows)


def _print_lines(report: Report) -> None:
    for proof in report.proofs:
        typer.echo(f"{proof.status:<10} {proof.name}: {proof.claim}")
        if proof.reason:
            typer.echo(f"           reason: {proof.reason}")
        typer.echo(f"           {_numbers(proof.numbers)}")
    for window in report.windows if isinstance(report, LoadReport) else ():
        typer.echo(", ".join(f"{column} {cell}" for column, cell in zip(_COLUMNS, _cells(window), strict=True)))


def _cells(window: LoadWindow) -> tuple[str, ...]:
    return (
        f"{window.first}-{window.last}",
        f"{window.seconds:g}",
        *(str(count) for count in (window.answered, window.cancelled, window.failed)),
        f"{window.different} of {window.compared}",
    )


def run_eval(name: str | None, settings: EvalSettings, *, harness: str | None, as_json: bool) -> None:
    """Prints the score of each repeat and the verdict. Raises VerifyError below the threshold, after that."""
    if settings.task.endswith((".yaml", ".yml")):
        settings = replace(settings, task=_task_file(settings.task))
    run_dir, state, plan = find_serving(name, "eval")
    program = find_harness(harness, os.environ)
    verdict = run_to_its_end(
        evaluate(run_dir, state, plan, settings, harness=program, environ=os.environ, on_repeat=_show_score)
    )
    if as_json:
        typer.echo(json.dumps(verdict.to_json(), indent=2))
    else:
        typer.echo(
            f"{verdict.task}: {verdict.metric} {verdict.mean:.4f} over {len(verdict.scores)} x {verdict.questions} "
            f"questions, from {min(verdict.scores):.4f} to {max(verdict.scores):.4f}; threshold {verdict.threshold:g}"
        )
        typer.echo(f"results: {verdict.folder}")
    verdict.raise_for_status()


def _task_file(path: str) -> str:
    """Return the absolute path of a task file, whose suffix must be .yaml: the harness takes no other."""
    file = Path(path).absolute()
    if not file.is_file():
        raise typer.BadParameter(f"there is no task file {path}")
    if file.suffix != ".yaml":
        raise typer.BadParameter(f"the harness reads task files named .yaml only: mv {path} {file.stem}.yaml")
    return str(file)


def _show_score(score: Score) -> None:
    stderr = "" if score.stderr is None else f" +- {score.stderr:.4f}"
    typer.echo(f"{score.metric} {score.value:.4f}{stderr} of {score.questions} questions", err=True)


def find_serving(name: str | None, verb: str) -> tuple[RunDir, DeploymentState, Plan]:
    """Find a deployment that serves, with its state and plan. Raises StateError when it does not serve, or not with its
    launcher on this machine."""
    run_dir = find(home(os.environ), name)
    state, plan = run_dir.read_state(), run_dir.read_plan()
    if not has_living_launcher(run_dir, state) or state.phase not in ("ready", "degraded"):
        raise StateError(f"{state.name} is not serving ({state.phase})", todo="pdserve up, or pdserve status")
    check_host(state, f"{state.name} is proven", verb)
    return run_dir, state, plan
