"""One Slurm job as a login node sees it: submitted, looked at, cancelled. Reads and calls Slurm's own tools."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pdserve.errors import PreflightError, StateError
from pdserve.system.process import LATE, output_of
from pdserve.system.stop_signals import held_back

_TOOL_SECONDS = 30.0
_SHAPE_SECONDS = 10.0
_FIELD = re.compile(r"(?:^|\s)(JobState|Reason|ExitCode|StdOut|NodeList)=(.*?)(?=\s+[A-Z][\w:/]*=|\s*$)", re.MULTILINE)
"""A value goes on to the next name: paths may have blanks."""
_ASKED = re.compile(r"(?:^|\s)TresPerNode=(\S+)")
_GPUS = re.compile(r"(?:gres[:/])?gpu((?:[:=][^:=,]+)*)")
AWAY = ("Unable to contact slurm controller", "Socket timed out", "Zero Bytes were transmitted", LATE)
"""What Slurm's tools say of a controller that does not answer, and what is said of a tool that waits too long."""
_CORRECT = "correct the slurm section of the recipe (--set slurm.partition=...); pdserve render RECIPE --slurm has it"
_TAKEN = "scontrol ping; squeue --me shows whether it was taken all the same, and scancel JOB ends it"
ENDED = (
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "TIMEOUT",
)


@dataclass(frozen=True)
class Job:
    """A job's state in Slurm now."""

    id: str
    state: str
    reason: str
    nodes: str
    exit_code: int
    """Of the batch script; 128 + the signal that ended it."""
    output: Path | None

    @property
    def over(self) -> bool:
        return self.state in ENDED

    def __str__(self) -> str:
        reason = f" ({self.reason})" if self.reason not in ("", "None") else ""
        where = f" on {self.nodes}" if self.nodes not in ("", "(null)") else ""
        return f"job {self.id}: {self.state.lower()}{reason}{where}"


def submit(script: str, options: Sequence[str] = ()) -> str:
    """Gives a batch script to sbatch and returns the job's id. `options`: of sbatch, that win over those of the script.
    To be called in `held_back`: an sbatch that is cut off may have given the job to Slurm already, and nobody would
    know its id. Raises PreflightError with sbatch's own words."""
    if shutil.which("sbatch") is None:
        raise PreflightError(
            "--slurm: there is no sbatch on this machine's PATH",
            cause="it is no login node of a Slurm cluster, or Slurm's commands are in a folder that PATH lacks "
            "(module load slurm)",
            todo="run the command on a login node, or take the script there (`pdserve render RECIPE --slurm`, or "
            "`pdserve run RECIPE --slurm --dry-run -- COMMAND`); "
            "without Slurm: `pdserve up RECIPE` for this machine, `--cluster FILE` for hosts that ssh reaches",
        )
    argv = ["sbatch", "--parsable", *options]
    tool = output_of(argv, timeout=_TOOL_SECONDS, stdin=script, own_session=True)
    job = tool.out.strip().partition(";")[0]
    if tool.code != 0 or not job.isdecimal():
        raise PreflightError(
            "sbatch did not take the job",
            cause=(tool.err or tool.out).strip() or f"exit code {tool.code}",
            todo=_TAKEN if any(words in tool.err for words in AWAY) else _CORRECT,
        )
    return job


def look(job: str) -> Job | None:
    """None: Slurm's controller does not answer now; its jobs go on. Raises StateError when it does not know the job
    (any more)."""
    tool = output_of(["scontrol", "show", "job", "--oneliner", job], timeout=_TOOL_SECONDS)
    if tool.code != 0 and any(words in tool.err for words in AWAY):
        return None
    fields = dict(_FIELD.findall(tool.out))
    if tool.code != 0 or "JobState" not in fields:
        raise StateError(f"Slurm does not know job {job}", cause=tool.err.strip() or tool.out.strip() or None)
    code, _, signal = fields.get("ExitCode", "0:0").partition(":")
    return Job(
        id=job,
        state=fields["JobState"],
        reason=fields.get("Reason", ""),
        nodes=fields.get("NodeList", ""),
        exit_code=128 + int(signal) if signal.isdecimal() and int(signal) else int(code),
        output=Path(fields["StdOut"]) if fields.get("StdOut") else None,
    )


def gpus_asked_per_node(job: str) -> int | None:
    """How many GPUs of each node the job has asked for; None where Slurm does not know, or was asked in another way.

    Steps get no more than these. The variables of an exclusive job count all GPUs of a node, because no other job may
    have them (srun(1), --gres; as tried on Slurm 22.05).
    """
    tool = output_of(["scontrol", "show", "job", "--oneliner", job], timeout=_SHAPE_SECONDS)
    asked = _ASKED.search(tool.out) if tool.code == 0 else None
    if asked is None:
        return None
    counts = [_count(fields.group(1)) for item in asked.group(1).split(",") if (fields := _GPUS.fullmatch(item))]
    return sum(counts) if counts else None


def _count(tail: str) -> int:
    """Of `:a100:2`, `:2`, `=2`, or nothing, which is one."""
    last = re.split("[:=]", tail)[-1]
    return int(last) if last.isdecimal() else 1


def cancel(job: str) -> None:
    """Abrupt: `pdserve down` stops a deployment in order. Safe to call for a job that is over. A Ctrl-C that comes
    meanwhile is raised after it."""
    with held_back():
        output_of(["scancel", job], timeout=_TOOL_SECONDS, own_session=True)
