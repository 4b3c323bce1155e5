"""Verbs that prove or explain a deployment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdserve.cli.options import JsonOption, NameArgument

verbs = typer.Typer()


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
    from pdserve.cli.proofs import load_options, run_verify

    typed = {
        "concurrency": concurrency,
        "requests": requests,
        "seconds": seconds,
        "window": window,
        "sample": sample,
        "longest_prompt": longest_prompt,
        "seed": seed,
    }
    run_verify(name, as_json=json_, load=load_options(typed, load=load))


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
    from pdserve.cli.proofs import run_eval
    from pdserve.evaluation import EvalSettings

    settings = EvalSettings(
        task=task,
        threshold=threshold,
        metric=metric,
        repeats=repeats,
        limit=limit,
        fewshot=fewshot,
        concurrency=concurrency,
    )
    run_eval(name, settings, harness=harness, as_json=json_)


@verbs.command()
def doctor(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[DEPLOYMENT|RUN_DIR]", help="A deployment, or a run directory; the only one if there is one."
        ),
    ] = None,
    json_: JsonOption = False,
    bundle: Annotated[
        Path | None,
        typer.Option("--bundle", metavar="FILE", help="Also write an archive for an issue, without secrets (.tar.gz)."),
    ] = None,
    logs: Annotated[
        bool, typer.Option("--logs", help="With --bundle: the ends of the logs too; engines log prompts.")
    ] = False,
) -> None:
    """Find why a run failed, or is slow: causes with evidence and fix. Changes nothing. Exit 10 when there are any.

    It reads the run directory of a deployment that lives or is over: logs, history, records. It asks the
    processes that live for their figures.
    """
    from pdserve.cli.doctor import run

    run(target, as_json=json_, bundle=bundle, logs=logs)
