"""Act on a node from the test process: commands in its namespaces, code in its network, and a look at what is there."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TypeVar

from pdserve.system import procfs
from tests.cluster import kernel

Stream = int | IO[str] | None


class NodeProcess(subprocess.Popen[str]):
    """A process in a node. Signals go to the program itself; it is killed when the test process ends."""

    def __init__(
        self,
        init: int,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: Stream = subprocess.DEVNULL,
        stdout: Stream = subprocess.PIPE,
        stderr: Stream = subprocess.PIPE,
    ) -> None:
        enter = ["nsenter", "--target", str(init), "--net", "--uts", "--mount", "--pid", "--"]
        # The folder is entered by its name, inside: one that came along from outside has no path there.
        # As in a terminal: what a shell starts in the background ignores Ctrl-C, and so would all that is started here.
        inside = [
            "env",
            "--default-signal=INT,QUIT",
            f"--chdir={cwd or Path.cwd()}",
            "setpriv",
            "--pdeathsig",
            "KILL",
            "--",
            *argv,
        ]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        super().__init__(
            [*enter, *inside],
            env=environment | dict(env or {}),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            text=True,
        )

    @property
    def inner_pid(self) -> int | None:
        """The program's PID outside; None before it has started and after it has ended."""
        try:
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        except OSError:
            return None
        return int(children[0]) if children else None

    def send_signal(self, sig: int) -> None:
        """nsenter itself would die and leave the program behind."""
        self.poll()
        if self.returncode is not None:
            return
        inner = self.inner_pid
        try:
            os.kill(self.pid if inner is None else inner, sig)
            if sig in (signal.SIGCONT, signal.SIGKILL):  # nsenter stops with its program, and would never see its end
                os.kill(self.pid, signal.SIGCONT)
        except ProcessLookupError:
            return


Result = TypeVar("Result")


def in_network(init: int, work: Callable[[], Result]) -> Result:
    """Runs `work` in a thread that has gone into the network of a node; returns or raises what it does.

    Only the network is the node's: names are not looked up in its /etc/hosts, so use addresses.
    """

    def go() -> Result:
        kernel.enter(Path(f"/proc/{init}/ns/net"), kernel.NEW_NET)
        return work()

    # A thread cannot be told apart from others by where it is, so this one serves once and ends.
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(go).result()


_DAEMONS = ("slurmctld", "slurmd", "sshd")
_OF_DOCKER = ("dockerd", "containerd")


def node_processes(init: int) -> list[tuple[int, list[str]]]:
    """(PID outside, argv) of all processes in the node's PID namespace, and in those of containers below it, but its
    first one and its daemons."""
    space = _namespace(init)
    pids = {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    inside = {pid for pid in pids if _namespace(pid) == space}
    processes = []
    for pid in procfs.family(inside) - {init}:
        argv = _argv(pid)
        if argv and not _is_daemon(pid, init, argv):
            processes.append((pid, argv))
    return sorted(processes)


def node_segments(init: int) -> list[str]:
    """Names in the node's /dev/shm, without semaphores: multiprocessing unlinks theirs as soon as they are open."""
    shm = Path(f"/proc/{init}/root/dev/shm")
    return sorted(path.name for path in shm.iterdir() if not path.name.startswith("sem."))


def _is_daemon(pid: int, init: int, argv: list[str]) -> bool:
    """Direct children of the first process, of which sshd's listener gives itself a title as its sessions do, and the
    helper that slurmctld forks."""
    if argv[0] == "slurmctld: slurmscriptd" or argv[0].rpartition("/")[2] in _OF_DOCKER:
        return True
    if _parent(pid) != init:
        return False
    return argv[0].rpartition("/")[2] in _DAEMONS or "[listener]" in argv[0]


def _namespace(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")  # noqa: PTH115  (pid:[n] is no path)
    except OSError:
        return None


def _parent(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat[stat.rindex(")") + 2 :].split()[1])


def _argv(pid: int) -> list[str]:
    """Empty for a process that has ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []
    if procfs.identify(pid) is None:
        return []
    return [word.decode(errors="replace") for word in words if word]
