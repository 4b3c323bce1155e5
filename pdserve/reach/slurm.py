"""Slurm as a login node sees it: one job or an array, submitted, looked at, cancelled, by Slurm's own tools.

And what Slurm leaves in the environment. Every option of sbatch and srun is also a variable, set for everything inside
the job: an srun in it obeys SLURM_NTASKS_PER_NODE or SLURM_CPU_BIND set by another step (22.05, srun(1), "input
environment variables"), and libraries inside an engine take SLURM_PROCID, SLURM_NTASKS or PMI_RANK for their own ranks.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pdserve.errors import PreflightError, StateError
from pdserve.system.process import LATE, Output, output_of
from pdserve.system.stop_signals import hold_stops

_TOOL_SECONDS = 30.0
_SHAPE_SECONDS = 10.0
_FIELD = re.compile(
    r"(?:^|\s)(ArrayTaskId|JobState|Reason|ExitCode|StdOut|NodeList)=(.*?)(?=\s+[A-Z][\w:/]*=|\s*$)", re.MULTILINE
)
"""A value goes on to the next name: paths may have blanks."""
_ASKED = re.compile(r"(?:^|\s)TresPerNode=(\S+)")
_GPUS = re.compile(r"(?:gres[:/])?gpu((?:[:=][^:=,]+)*)")
AWAY = ("Unable to contact slurm controller", "Socket timed out", "Zero Bytes were transmitted", LATE)
"""What Slurm's tools say of a controller that does not answer, and what is said of a tool that waits too long."""
_UNKNOWN = "Invalid job id"
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

_PREFIXES = ("SLURM_", "SLURMD_", "SRUN_", "SBATCH_", "SALLOC_", "PMI_", "PMI2_", "PMIX_")
_CLUSTER = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
"""Where the cluster is."""
_JOB = "SLURM_JOB_ID"


def srun_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of our own srun: it knows its cluster; job and options are on its command line."""
    return {name: value for name, value in environ.items() if not name.startswith(_PREFIXES) or name in _CLUSTER}


def without_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of what an agent starts. The job's id stays, for logs and for people."""
    return {name: value for name, value in environ.items() if not name.startswith(_PREFIXES) or name == _JOB}


@dataclass(frozen=True)
class SlurmState:
    """The state of a job, or of a task of an array, in Slurm now."""

    state: str
    reason: str
    exit_code: int
    """That of the batch script; 128 + the signal that ended it."""
    output: Path | None

    @property
    def over(self) -> bool:
        return self.state in ENDED

    @property
    def words(self) -> str:
        return self.state.lower() + (f" ({self.reason})" if self.reason not in ("", "None") else "")


@dataclass(frozen=True)
class Job(SlurmState):
    """A job's state in Slurm now."""

    id: str
    nodes: str

    def __str__(self) -> str:
        return f"job {self.id}: {self.words}" + (f" on {self.nodes}" if self.nodes not in ("", "(null)") else "")


@dataclass(frozen=True)
class SlurmTask(SlurmState):
    """The state of a task of an array in Slurm now."""

    number: int

    def __str__(self) -> str:
        return self.words + (f", exit code {self.exit_code}" if self.over and self.exit_code else "")


def submit(script: str, options: Sequence[str] = ()) -> str:
    """Give a batch script to sbatch and return the job's id. `options`: of sbatch, that win over those of the script.

    This is called within `hold_stops`: an sbatch that is cut off may have given the job to Slurm already, and nobody
    would know its id. Raises PreflightError with sbatch's own words.
    """
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
    """Look at a job. None: Slurm's controller does not answer now; its jobs go on. Raises StateError when it does not
    know the job (any more)."""
    tool = _show(job)
    if _is_away(tool):
        return None
    fields = dict(_FIELD.findall(tool.out))
    if tool.code != 0 or "JobState" not in fields:
        raise StateError(f"Slurm does not know job {job}", cause=tool.err.strip() or tool.out.strip() or None)
    return Job(
        id=job,
        state=fields["JobState"],
        reason=fields.get("Reason", ""),
        nodes=fields.get("NodeList", ""),
        exit_code=_exit_code(fields),
        output=Path(fields["StdOut"]) if fields.get("StdOut") else None,
    )


def _show(job: str, seconds: float | None = None) -> Output:
    return output_of(["scontrol", "show", "job", "--oneliner", job], timeout=seconds or _TOOL_SECONDS)


def _is_away(tool: Output) -> bool:
    return tool.code != 0 and any(words in tool.err for words in AWAY)


def _exit_code(fields: Mapping[str, str]) -> int:
    code, _, signal = fields.get("ExitCode", "0:0").partition(":")
    return 128 + int(signal) if signal.isdecimal() and int(signal) else int(code)


def gpus_asked_per_node(job: str) -> int | None:
    """Return how many GPUs of each node the job asked for; None where Slurm does not know, or was asked another way.

    Steps get no more than these. The variables of an exclusive job count all GPUs of a node, because no other job may
    have them (srun(1), --gres; as tried on Slurm 22.05).
    """
    tool = _show(job, _SHAPE_SECONDS)
    asked = _ASKED.search(tool.out) if tool.code == 0 else None
    if asked is None:
        return None
    counts = [_count(fields.group(1)) for item in asked.group(1).split(",") if (fields := _GPUS.fullmatch(item))]
    return sum(counts) if counts else None


def _count(tail: str) -> int:
    """Read `:a100:2`, `:2`, `=2`, or nothing, which is one."""
    last = re.split("[:=]", tail)[-1]
    return int(last) if last.isdecimal() else 1


def cancel(job: str) -> None:
    """Cancel a job, which is abrupt: `pdserve down` stops a deployment in order. It is safe to call this for a job that
    is over. A Ctrl-C that comes meanwhile is raised after it."""
    with hold_stops():
        output_of(["scancel", job], timeout=_TOOL_SECONDS, own_session=True)


def look_at_array(array: str) -> Mapping[int, SlurmTask] | None:
    """Look at a job array: the state of its tasks, by number.

    Empty: Slurm does not know it any more. None: the controller does not answer now. Raises StateError with scontrol's
    own words for anything else."""
    tool = _show(array)
    if tool.code == 0:
        return tasks_in(tool.out, array)
    if _is_away(tool):
        return None
    if _UNKNOWN in tool.err or _UNKNOWN in tool.out:
        return {}
    raise StateError(
        f"scontrol does not show job {array}",
        cause=(tool.err or tool.out).strip() or f"exit code {tool.code}",
        todo="on a login node of the cluster: module load slurm; the array goes on without this command",
    )


def tasks_in(text: str, array: str) -> Mapping[int, SlurmTask]:
    """Read what scontrol says of an array.

    Slurm 22.05 has a line for each task that was started, and one for all that wait (ArrayTaskId=2-5,7%2). A task that
    is over leaves it after MinJobAge (300 s)."""
    return {task.number: task for line in text.splitlines() for task in _tasks(line, array)}


def _tasks(line: str, array: str) -> Iterator[SlurmTask]:
    fields = dict(_FIELD.findall(line))
    for number in numbers(fields.get("ArrayTaskId", "")):
        output = fields.get("StdOut", "").replace("%A", array).replace("%a", str(number))
        yield SlurmTask(
            number=number,
            state=fields.get("JobState", ""),
            reason=fields.get("Reason", ""),
            exit_code=_exit_code(fields),
            output=Path(output) if output else None,
        )


def numbers(text: str) -> Iterator[int]:
    """Read the numbers of `2-5,7%2`; a step (`0-6:2`) too."""
    for part in filter(None, text.partition("%")[0].split(",")):
        span, _, step = part.partition(":")
        first, _, last = span.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            return
        yield from range(int(first), int(last or first) + 1, int(step or 1))


def stop_array(array: str) -> None:
    """Stop an array in order: tasks that wait are taken back, those that run get a TERM, which their script passes on.

    Raises PreflightError with scancel's own words."""
    for options in (["--state=PENDING"], ["--batch", "--signal=TERM"]):
        tool = output_of(["scancel", *options, array], timeout=_TOOL_SECONDS)
        if tool.code != 0 and _UNKNOWN not in tool.err:
            raise PreflightError(
                f"scancel did not stop job {array}", cause=tool.err.strip() or None, todo=f"scancel {array}"
            )
