"""Commands that run in a node's namespaces as children of the test process."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

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


def run_in_node(
    init: int,
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None,
    cwd: Path | None,
    timeout: float,
    stdin: str | None,
) -> subprocess.CompletedProcess[str]:
    """Like subprocess.run with captured text; at the timeout (seconds) the program is killed."""
    source = subprocess.DEVNULL if stdin is None else subprocess.PIPE
    with NodeProcess(init, argv, env=env, cwd=cwd, stdin=source) as process:
        try:
            out, err = process.communicate(stdin, timeout)
        finally:
            # Whatever ends the wait, a timeout or Ctrl-C: the program does not outlive it.
            process.send_signal(signal.SIGKILL)
    return subprocess.CompletedProcess(list(argv), process.returncode, out, err)
