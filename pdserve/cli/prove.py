"""Verbs that prove a deployment: `verify`, `eval`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdserve.cli.options import JsonOption, NameArgument
from pdserve.cli.output import VerbOutput

if TYPE_CHECKING:
    from pdserve.evaluation import Score
    from pdserve.plan.model import Plan
    from pdserve.run.directory import RunDir
    from pdserve.run.state import DeploymentState
    from pdserve.verify import Report
    from pdserve.verify.load import LoadOptions, LoadWindow
    from pdserve.verify.load.traffic import SentWindow

verbs = typer.Typer()
_RECORDED_SECONDS = 1.0
_STYLES = {"proven": "green", "failed": "bold red", "not-proven": "yellow"}


@verbs.command()
def verify(
    name: NameArgument = None,
    json_: JsonOption = False,
    load: Annotated[
        bool, typer.Option("--load", help="Prove it under load: many requests at once, some cancelled, with reloads.")
    ] = False,
    concurrency: Annotated[
        # The client has 100 connections: more requests would wait for one, and not in the deployment.
        int | None, typer.Option("--concurrency", min=1, max=100, help="Requests at once; 8.", show_default=False)
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option("--requests", min=1, help="Requests in all; 200, without --seconds.", show_default=False),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            "--seconds", min=1, help="Send for so long; with --requests: what comes first.", show_default=False
        ),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option("--window", min=8, help="Requests between two reloads, and of a line of the report; 50."),
    ] = None,
    sample: Annotated[
        float | None,
        typer.Option("--sample", min=0, max=1, help="Share of the answers that is compared; 0.25.", show_default=False),
    ] = None,
    longest_prompt: Annotated[
        int | None, typer.Option("--longest-prompt", min=32, help="In tokens; 2048, or what the model takes.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Another one makes other prompts; 0.", show_default=False)
    ] = None,
) -> None:
    """Prove that the running deployment moves KV: output, transfer, cache, cleanliness.

    With --load many prompts of mixed length that share prefixes are sent at once. A sample of the answers is compared
    with one engine alone, once the load is over; the report has the share that differs, and when in the run.
    """
    typed = {
        "concurrency": concurrency,
        "requests": requests,
        "seconds": seconds,
        "window": window,
        "sample": sample,
        "longest_prompt": longest_prompt,
        "seed": seed,
    }
    import asyncio

    from pdserve.operations.current_run import find_serving
    from pdserve.run.directory import home

    options = load_options(typed, load=load)
    run_dir, state, plan = find_serving(home(os.environ), name, "verify")
    _, began = run_dir.read_events()
    report = asyncio.run(_prove(run_dir, state, plan, options))
    report = report.model_copy(update={"meanwhile": _meanwhile(run_dir, began, failed=bool(report.having("failed")))})
    if json_:
        typer.echo(json.dumps(report.to_json(), indent=2))
    else:
        out = VerbOutput()
        for line, style in _report_lines(report):
            out.line(line, style)
    report.raise_for_status()


def load_options(typed: Mapping[str, int | float | None], *, load: bool) -> LoadOptions | None:
    """Return the options of a load; None: no load was asked for. `typed`: field of LoadOptions -> what was typed.
    Raises BadParameter for options without --load."""
    from pdserve.verify.load import LoadOptions

    given = {name: value for name, value in typed.items() if value is not None}
    if not load:
        if given:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise typer.BadParameter(f"{options}: only with --load")
        return None
    until = {} if "requests" in given or "seconds" not in given else {"requests": None}
    return replace(LoadOptions(), **until, **given)  # type: ignore[arg-type]


async def _prove(run_dir: RunDir, state: DeploymentState, plan: Plan, load: LoadOptions | None) -> Report:
    from pdserve.observe.remote_http import client, seen_from_here
    from pdserve.verify import run_proofs
    from pdserve.verify.load import run_load

    seen, key = seen_from_here(plan, state), run_dir.read_key()
    async with client(run_dir, state) as everywhere:
        if load is None:
            return await run_proofs(seen, engine_key=key, client=everywhere)
        return await run_load(seen, load, engine_key=key, client=everywhere, on_window=_progress)


def _meanwhile(run_dir: RunDir, began: int, *, failed: bool) -> tuple[str, ...]:
    """Return what went wrong in the deployment since a byte of its history, a line an event. A request fails a moment
    before the launcher has recorded the death that is its cause: after a failure that moment is waited for."""
    from pdserve.operations.progress import event_text
    from pdserve.run.history import INCIDENTS

    until = time.monotonic() + (_RECORDED_SECONDS if failed else 0.0)
    while True:
        events, _ = run_dir.read_events(began)
        texts = [text for event in events if event["event"] in INCIDENTS and (text := event_text(event))]
        if texts or time.monotonic() >= until:
            return tuple(" ".join(text.split()) for text in texts)
        time.sleep(0.05)


def _progress(window: SentWindow) -> None:
    """Print a line for a window of the load, apart from the report: a load takes minutes."""
    from pdserve.verify.load.traffic import ENDINGS

    counts = ", ".join(f"{len(window.ended(how))} {how}" for how in ENDINGS)
    typer.echo(f"requests {window.first}-{window.last}: {counts}, {window.seconds:g} s", err=True)


def _numbers(numbers: Mapping[str, object]) -> str:
    return " ".join(f"{key}={value}" for key, value in numbers.items())


def _report_lines(report: Report) -> Iterator[tuple[str, str]]:
    """Yield the lines of a report, each with its style."""
    from pdserve.verify.load import LoadReport

    for proof in report.proofs:
        yield f"{proof.status:<10} {proof.name}: {proof.claim}", _STYLES[proof.status]
        if proof.reason:
            yield f"           reason: {proof.reason}", ""
        yield f"           {_numbers(proof.numbers)}", ""
    for window in report.windows if isinstance(report, LoadReport) else ():
        yield _window_line(window), ""


def _window_line(window: LoadWindow) -> str:
    return (
        f"requests {window.first}-{window.last}, until second {window.seconds:g}, answered {window.answered}, "
        f"cancelled {window.cancelled}, failed {window.failed}, differ {window.different} of {window.compared}"
    )


@verbs.command("eval")
def eval_(
    task: Annotated[str, typer.Argument(help="A task of the harness (gsm8k), or a task file (.yaml).")],
    threshold: Annotated[float, typer.Option("--threshold", help="The mean score of the repeats must reach it.")],
    name: NameArgument = None,
    metric: Annotated[
        str | None,
        typer.Option("--metric", help="As in the harness's results: exact_match,flexible-extract", show_default=False),
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="How often all questions are asked.")] = 1,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Only so many questions.", show_default=False)
    ] = None,
    fewshot: Annotated[
        int | None,
        typer.Option("--fewshot", min=0, help="Examples before a question; else the task's.", show_default=False),
    ] = None,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, help="Questions at once.")] = 8,
    harness: Annotated[
        str | None,
        typer.Option("--harness", metavar="PROGRAM", help="lm_eval of an environment of its own.", show_default=False),
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Ask the running deployment the questions of a task (lm-evaluation-harness), and demand a score.

    Tasks that generate text, through the proxy, without retries. Exit 6 below the threshold, 7 when there is no score.
    The results stay in the run directory.
    """
    from pdserve.evaluation import EvalSettings, evaluate, find_harness
    from pdserve.operations.current_run import find_serving
    from pdserve.run.directory import home
    from pdserve.system.stop_signals import run_to_its_end

    settings = EvalSettings(
        task=_task_file(task) if task.endswith((".yaml", ".yml")) else task,
        threshold=threshold,
        metric=metric,
        repeats=repeats,
        limit=limit,
        fewshot=fewshot,
        concurrency=concurrency,
    )
    run_dir, state, plan = find_serving(home(os.environ), name, "eval")
    program = find_harness(harness, os.environ)
    verdict = run_to_its_end(
        evaluate(run_dir, state, plan, settings, harness=program, environ=os.environ, on_repeat=_show_score)
    )
    if json_:
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
