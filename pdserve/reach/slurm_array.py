"""A job array as a login node sees it: the state of each of its tasks. Reads and calls Slurm's own tools.

Slurm 22.05's `scontrol show job --oneliner ARRAY` has a line for each task that was started, and one for all that wait
(ArrayTaskId=2-5,7%2). A task that is over leaves it after MinJobAge (300 s).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pdserve.errors import PreflightError, StateError
from pdserve.reach.slurm_job import AWAY, ENDED
from pdserve.system.process import output_of

_TOOL_SECONDS = 30.0
_FIELD = re.compile(r"(?:^|\s)(ArrayTaskId|JobState|Reason|ExitCode|StdOut)=(.*?)(?=\s+[A-Z][\w:/]*=|\s*$)")
"""A value goes on to the next name: paths may have blanks."""
_UNKNOWN = "Invalid job id"


@dataclass(frozen=True)
class SlurmTask:
    """A task's state in Slurm now."""

    number: int
    state: str
    reason: str
    exit_code: int
    """Of the batch script; 128 + the signal that ended it."""
    output: Path | None

    @property
    def over(self) -> bool:
        return self.state in ENDED

    def __str__(self) -> str:
        reason = f" ({self.reason})" if self.reason not in ("", "None") else ""
        code = f", exit code {self.exit_code}" if self.over and self.exit_code else ""
        return f"{self.state.lower()}{reason}{code}"


def tasks_in(text: str, array: str) -> Mapping[int, SlurmTask]:
    """What scontrol says of an array, by the number of the task."""
    return {task.number: task for line in text.splitlines() for task in _tasks(line, array)}


def look_at_array(array: str) -> Mapping[int, SlurmTask] | None:
    """Empty: Slurm does not know it any more. None: the controller does not answer now. Raises StateError with
    scontrol's own words for anything else."""
    tool = output_of(["scontrol", "show", "job", "--oneliner", array], timeout=_TOOL_SECONDS)
    if tool.code == 0:
        return tasks_in(tool.out, array)
    if any(words in tool.err for words in AWAY):
        return None
    if _UNKNOWN in tool.err or _UNKNOWN in tool.out:
        return {}
    raise StateError(
        f"scontrol does not show job {array}",
        cause=(tool.err or tool.out).strip() or f"exit code {tool.code}",
        todo="on a login node of the cluster: module load slurm; the array goes on without this command",
    )


def stop_array(array: str) -> None:
    """In order: tasks that wait are taken back, those that run get a TERM, which their script passes on. Raises
    PreflightError with scancel's own words."""
    for options in (["--state=PENDING"], ["--batch", "--signal=TERM"]):
        tool = output_of(["scancel", *options, array], timeout=_TOOL_SECONDS)
        if tool.code != 0 and _UNKNOWN not in tool.err:
            raise PreflightError(
                f"scancel did not stop job {array}", cause=tool.err.strip() or None, todo=f"scancel {array}"
            )


def _tasks(line: str, array: str) -> Iterator[SlurmTask]:
    fields = dict(_FIELD.findall(line))
    code, _, signal = fields.get("ExitCode", "0:0").partition(":")
    for number in numbers(fields.get("ArrayTaskId", "")):
        output = fields.get("StdOut", "").replace("%A", array).replace("%a", str(number))
        yield SlurmTask(
            number=number,
            state=fields.get("JobState", ""),
            reason=fields.get("Reason", ""),
            exit_code=128 + int(signal) if signal.isdecimal() and int(signal) else int(code),
            output=Path(output) if output else None,
        )


def numbers(text: str) -> Iterator[int]:
    """Of `2-5,7%2`; a step (`0-6:2`) too."""
    for part in filter(None, text.partition("%")[0].split(",")):
        span, _, step = part.partition(":")
        first, _, last = span.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            return
        yield from range(int(first), int(last or first) + 1, int(step or 1))
