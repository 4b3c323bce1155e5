"""The process between a test process and its sandbox: `python -m tests.cluster.keeper OWNER_PID FOLDER`.

It ends the sandbox when its owner ends, however that happened, and removes what a dead sandbox leaves on the machine:
the empty cgroups of its Slurm. Orders and answers go past it: the sandbox has its stdin and stdout.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from tests.cluster.machine import remove_cgroups
from tests.cluster.spec import Spec

_SANDBOX = [
    *("setpriv", "--pdeathsig", "KILL"),
    # A network of its own too: nothing in the sandbox can reach the machine's.
    *("unshare", "--mount", "--uts", "--net", "--pid", "--fork", "--kill-child=SIGKILL"),
    *("--mount-proc", "--propagation", "private"),
]


def main(owner: int, folder: Path) -> int:
    # A Ctrl-C for the tests is the tests' to handle; they close the sandbox when they are done.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    owned = os.pidfd_open(owner)
    sandbox = subprocess.Popen([*_SANDBOX, sys.executable, "-S", "-m", "tests.cluster.sandbox", str(folder)])
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    ended = os.pidfd_open(sandbox.pid)
    # Only now, with the owner's end in view, is its being alive a fact.
    if os.getppid() == owner:
        select.select([owned, ended], [], [])
    sandbox.kill()
    code = sandbox.wait()
    remove_cgroups(Spec.read(folder).prefix)
    return 0 if code in (0, -signal.SIGKILL) else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2])))
