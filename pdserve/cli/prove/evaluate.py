"""`pdserve eval`"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import typer

from pdserve.cli.prove.serving import serving
from pdserve.evaluation.harness import Score
from pdserve.evaluation.run import evaluate, find_harness
from pdserve.evaluation.settings import EvalSettings
from pdserve.system.stop_signals import run_to_its_end


def run(name: str | None, settings: EvalSettings, *, harness: str | None, as_json: bool) -> None:
    """Prints the score of each repeat and the verdict. Raises VerifyError below the threshold, after that."""
    if settings.task.endswith((".yaml", ".yml")):
        settings = replace(settings, task=_task_file(settings.task))
    run_dir, state, plan = serving(name, "eval")
    program = find_harness(harness, os.environ)
    verdict = run_to_its_end(
        evaluate(run_dir, state, plan, settings, harness=program, environ=os.environ, on_repeat=_progress)
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
    """The harness takes a file by its suffix .yaml only."""
    file = Path(path).absolute()
    if not file.is_file():
        raise typer.BadParameter(f"there is no task file {path}")
    if file.suffix != ".yaml":
        raise typer.BadParameter(f"the harness reads task files named .yaml only: mv {path} {file.stem}.yaml")
    return str(file)


def _progress(score: Score) -> None:
    stderr = "" if score.stderr is None else f" +- {score.stderr:.4f}"
    typer.echo(f"{score.metric} {score.value:.4f}{stderr} of {score.questions} questions", err=True)
