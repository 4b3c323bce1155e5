"""Act on a node from the test process: commands in its namespaces, and a look at what is there."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from pdserve.system import procfs

Stream = int | IO[str] | None


def entering(init: int) -> list[str]:
    """The command after which another one runs where the first process of a node, or of the sandbox, is."""
    return ["nsenter", "--target", str(init), "--net", "--uts", "--mount", "--pid", "--"]


def only_child(pid: int) -> int:
    """0 before it has been started and after it has ended."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0
    return int(children[0]) if children else 0


class NodeProcess(subprocess.Popen[str]):
    """A process in a node. Signals go to the program itself; it is killed when the test process ends."""

    def __init__(
        self,
        init: int,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdout: Stream = subprocess.PIPE,
        stderr: Stream = subprocess.PIPE,
    ) -> None:
        # The folder is entered by its name, inside: one that came along from outside has no path there.
        # As in a terminal: what a shell starts in the background ignores Ctrl-C, and so would all that is started here.
        inside = ["env", "--default-signal=INT,QUIT", f"--chdir={cwd or Path.cwd()}", "setpriv", "--pdeathsig", "KILL"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        super().__init__(
            [*entering(init), *inside, "--", *argv],
            env=environment | dict(env or {}),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            text=True,
        )

    def send_signal(self, sig: int) -> None:
        """nsenter itself would die and leave the program behind."""
        self.poll()
        if self.returncode is not None:
            return
        try:
            os.kill(only_child(self.pid) or self.pid, sig)
            if sig in (signal.SIGCONT, signal.SIGKILL):  # nsenter stops with its program, and would never see its end
                os.kill(self.pid, signal.SIGCONT)
        except ProcessLookupError:
            return


def node_processes(init: int) -> list[tuple[int, list[str]]]:
    """(PID outside, argv) of all processes in the node's PID namespace, and in those of containers below it, but its
    first one and its daemons."""
    space, seen = _namespace(init), procfs.relations()
    inside = {pid for pid in seen if _namespace(pid) == space}
    running = [(pid, _argv(pid)) for pid in sorted(procfs.family(inside, seen=seen) - {init})]

    def is_daemon(pid: int, title: str) -> bool:
        """sshd's listener gives itself a title as its sessions do; slurmctld forks a helper."""
        name = title.rpartition("/")[2]
        if name in ("dockerd", "containerd", "slurmctld: slurmscriptd"):
            return True
        return seen[pid].parent == init and (name in ("slurmctld", "slurmd", "sshd") or "[listener]" in title)

    return [(pid, argv) for pid, argv in running if argv and not is_daemon(pid, argv[0])]


def _namespace(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")  # noqa: PTH115  (pid:[n] is no path)
    except OSError:
        return None


def _argv(pid: int) -> list[str]:
    """Empty for a process that has ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []
    return [word.decode(errors="replace") for word in words if word]
