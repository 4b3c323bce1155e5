"""A machine of a plan, how it is reached (here, by Slurm, by ssh), and the line that starts its agent.

Argument lists only. srun, as tried on Slurm 22.05: a TERM to the srun client kills its task at once, without a grace,
so none is sent; stops go through the pipe. Options that sites preset or that sbatch leaves in the environment are set
here.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import Annotated, Literal, assert_never

from pydantic import Field

from pdserve.plan.frozen import Frozen
from pdserve.recipe.sections import Timeouts


class Local(Frozen):
    """Reaches the node through a child of the launcher."""

    kind: Literal["local"] = "local"


class Srun(Frozen):
    """Reaches the node through a step of a Slurm job."""

    kind: Literal["srun"] = "srun"
    job: str
    """The job's id."""
    kill_wait: float
    """Seconds from the TERM of scancel, or of the time limit, to its KILL (KillWait of slurm.conf)."""
    options: tuple[str, ...] = ()
    """Options of a container (pyxis)."""


class Ssh(Frozen):
    """Reaches the node through a session on a host."""

    kind: Literal["ssh"] = "ssh"
    destination: str
    """ssh's argument: a host, user@host, or a name in its configuration."""
    config: str | None = None
    options: tuple[str, ...] = ()
    connect_seconds: int = 10


Reach = Annotated[Local | Srun | Ssh, Field(discriminator="kind")]

_KILL_WAIT_MARGIN_SECONDS = 5.0
_LOGIN_FEATURES_OFF = (
    "ClearAllForwardings=yes",  # a port that is forwarded already would fail the second connection
    "ForwardAgent=no",  # root of the host could use the user's keys for as long as the deployment lives
    "ForwardX11=no",
    "Tunnel=no",
    "PermitLocalCommand=no",
    "RemoteCommand=none",  # ssh refuses one beside ours; OpenSSH has this keyword since 7.6
)
"""What a user's ssh configuration may ask for when a person logs in. None of it is used, and ssh takes the first value
that it finds: the command line's."""


def reach_argv(reach: Local | Srun | Ssh, node: str, step: str, argv: Sequence[str]) -> tuple[str, ...]:
    """Return what to run here so that `argv` runs on `node`, with its stdin and stdout. `step`: name of the Slurm
    step."""
    match reach:
        case Local():
            return tuple(argv)
        case Srun():
            return (
                "srun",
                f"--jobid={reach.job}",
                f"--nodelist={node}",
                "--nodes=1",
                "--ntasks=1",
                f"--job-name={step}",
                "--overlap",  # beside the batch step, and beside each other
                "--kill-on-bad-exit=1",
                "--wait=0",
                "--cpu-bind=none",  # one task must have all CPUs of its node
                "--mpi=none",
                "--export=ALL",
                "--unbuffered",
                *reach.options,
                *argv,
            )
        case Ssh():
            return (
                "ssh",
                *(("-F", reach.config) if reach.config is not None else ()),
                "-T",
                *_ssh_option("BatchMode=yes"),  # a question would wait for ever
                *_ssh_option(f"ConnectTimeout={reach.connect_seconds}"),
                *_ssh_option("ControlMaster=no"),
                *_ssh_option("ControlPath=none"),  # a shared connection would end with a stranger's
                *(word for text in _LOGIN_FEATURES_OFF for word in _ssh_option(text)),
                *reach.options,
                "--",
                reach.destination,
                shlex.join(argv),  # the other side gives it to a shell
            )
        case _:
            assert_never(reach)


def term_seconds(reach: Local | Srun | Ssh) -> float | None:
    """Return the seconds that all stops on a node may take when Slurm asks for them; None: nothing is killed
    afterwards."""
    if not isinstance(reach, Srun):
        return None
    return max(1.0, reach.kill_wait - min(_KILL_WAIT_MARGIN_SECONDS, reach.kill_wait / 3))


def _ssh_option(text: str) -> tuple[str, str]:
    return "-o", text


class Node(Frozen):
    """A machine as the planner sees it. `devices`: ids that may be used (empty on CPU)."""

    name: str
    address: str = "127.0.0.1"
    devices: tuple[int, ...] = ()
    hostname: str | None = None
    """What `hostname` prints there; None: not known yet."""
    reach: Reach = Local()
    """How its agent is started."""
    command: tuple[str, ...] = ()
    """What runs the agent there: an interpreter, or a container with one. (): the launcher's own interpreter."""
    agent: tuple[str, ...] = ()
    """The whole line that starts the agent from here, through docker, srun or ssh, to be shown. (): not known yet, or
    a child of the launcher."""

    def python(self, otherwise: str) -> str:
        """Return the interpreter there, which stands last in `command`; `otherwise`: where nothing is known of it."""
        return self.command[-1] if self.command else otherwise


BEATS = 5
"""Beats in the length of a heartbeat: four may be late before a node counts as lost."""


def in_docker(node: Node) -> bool:
    """Return whether the agent of a node is in a container of a docker daemon, through which its pipe leads."""
    return node.command[:1] == ("docker",)


def has_lease(node: Node) -> bool:
    """Return whether a node's agent ends when it hears nothing for a time. On another node, and in docker, whose daemon
    holds the pipe, the end of the launcher may close nothing."""
    return not isinstance(node.reach, Local) or in_docker(node)


def step_name(node: str) -> str:
    """Return the name of the Slurm step that an agent is."""
    return f"pdserve-{node}"


def agent_argv(node: Node, *, run_dir: str, run_id: str, timeouts: Timeouts) -> list[str]:
    """Return what runs on the node."""
    argv = [
        *(node.command or (sys.executable,)),
        *("-m", "pdserve.node.agent"),
        *("--node", node.name, "--run-dir", run_dir, "--run-id", run_id),
    ]
    if has_lease(node):
        pulse = timeouts.heartbeat_seconds / BEATS
        argv += ["--pulse", f"{pulse:g}", "--lease", f"{timeouts.agent_lease_seconds:g}"]
    if (seconds := term_seconds(node.reach)) is not None:
        argv += ["--term-seconds", f"{seconds:g}"]
    return argv


def with_agent(node: Node, *, run_dir: str, run_id: str, timeouts: Timeouts) -> Node:
    """Return the node with the line that starts its agent from here: docker, srun or ssh. Secrets are not in it: the
    launcher sends them to the agent."""
    argv: Sequence[str] = agent_argv(node, run_dir=run_dir, run_id=run_id, timeouts=timeouts)
    return node.model_copy(update={"agent": reach_argv(node.reach, node.name, step_name(node.name), argv)})
