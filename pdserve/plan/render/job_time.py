"""The time limit of a job, as sbatch reads it, and whether it leaves any time to serve."""

from __future__ import annotations

import re

from pdserve.errors import RecipeError
from pdserve.recipe.model import Recipe

_EARLY_SECONDS = 60
"""Slurm may send a job its signal so much earlier than it was asked."""
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")


def check_time(recipe: Recipe, signal: int) -> None:
    """`signal`: seconds before the job's end at which it gets a TERM. Raises RecipeError where that is its start."""
    text = recipe.slurm.time
    seconds = None if text is None else seconds_of(text)
    least = signal + _EARLY_SECONDS
    if seconds is None or seconds > least:
        return
    hours, minutes = divmod(least // 60 + 1, 60)
    raise RecipeError(
        f"a job of {text} ({seconds} s) is stopped when it starts: it gets a TERM {signal} s before its end, which "
        f"Slurm may send {_EARLY_SECONDS} s earlier",
        where="slurm.time",
        cause=f"the proxy drains and all stages stop in those {signal} s, one after the other",
        todo=f'set slurm.time to "{hours:02d}:{minutes:02d}:00" and the time that start and work take; or lower '
        "timeouts.stop_seconds and proxy.drain_seconds",
    )


def seconds_of(text: str) -> int | None:
    """`MM`, `MM:SS`, `HH:MM:SS`, `D-HH`, `D-HH:MM` or `D-HH:MM:SS`, in whole minutes as Slurm counts. None: no limit,
    or sbatch's to refuse."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        return None
    days, first, second, third = (int(part or 0) for part in match.group("days", "first", "second", "third"))
    if match["days"] is not None or match["third"] is not None:
        seconds = days * 86400 + first * 3600 + second * 60 + third
    else:
        seconds = first * 60 + second
    return -(-seconds // 60) * 60 or None
