"""What is evaluated, and how good it has to be."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EvalSettings:
    """One task, asked `repeats` times."""

    task: str
    """A name that the harness knows, or the absolute path of a task file (.yaml)."""
    threshold: float
    """The mean of the repeats must reach it."""
    metric: str | None = None
    """As in the harness's results, for example `exact_match,strict-match`. None: the task has only one."""
    repeats: int = 1
    limit: int | None = None
    """Questions of the task; None: all."""
    fewshot: int | None = None
    """Examples before each question; None: as the task has it."""
    concurrency: int = 8
