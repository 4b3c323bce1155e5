"""A node: its namespaces, its first process and the daemons that a real one would have started at boot."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

from tests.cluster import kernel, network
from tests.cluster.reaper import reap, wakeups
from tests.cluster.spec import LOGIN, Spec

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def boot(spec: Spec, node: str) -> int:
    """Starts a node; returns the PID of its first process once its daemons have been started."""
    read_end, writing = os.pipe()
    helper = os.fork()
    if helper == 0:
        os.close(read_end)
        _be(spec, node, writing)
    os.close(writing)
    with os.fdopen(read_end) as pipe:
        # Helper and first process both write to it, in either order.
        answers = dict(line.split(" ", 1) for line in pipe.read().splitlines())
    os.waitpid(helper, 0)
    if not {"init", "up"} <= answers.keys():
        raise RuntimeError(
            f"{node} did not boot: {answers.get('error', 'its first process ended')}; logs in {spec.log}"
        )
    return int(answers["init"])


def _be(spec: Spec, node: str, pipe: int) -> None:
    """In the forked helper: goes into the namespaces and forks the node's first process, whose orphaning to the
    sandbox's first process is what keeps it waitable there."""
    code = 1
    try:
        kernel.enter(network.NAMESPACES / node, kernel.NEW_NET)
        kernel.unshare(kernel.NEW_MOUNTS | kernel.NEW_UTS | kernel.NEW_PIDS)
        init = os.fork()
        if init:
            os.write(pipe, f"init {init}\n".encode())
            code = 0
        else:
            _first_process(spec, node, pipe)
    except OSError as error:
        os.write(pipe, f"error {error}\n".encode())
    finally:
        os._exit(code)


def _first_process(spec: Spec, node: str, pipe: int) -> None:
    kernel.name_process(node)
    signal.set_wakeup_fd(-1)
    _silence(spec.log / f"boot-{node}.log")
    _own_mounts(spec, node)
    woken = wakeups()
    daemons = [_start(argv, spec.log / f"{argv[0]}-{node}.out") for argv in daemons_of(spec, node)]
    os.write(pipe, f"up {node}\n".encode())
    os.close(pipe)
    while True:
        select.select([woken], [], [])
        ended = reap(woken)
        for daemon in daemons:
            if daemon.pid in ended:
                print(f"{node}: {daemon.args!r} ended", flush=True)


def daemons_of(spec: Spec, node: str) -> list[list[str]]:
    commands = []
    if spec.slurm is not None:
        commands.append(["slurmctld", "-D", "-i"] if node == LOGIN else ["slurmd", "-D", "-N", node])
    if spec.ssh and node != LOGIN:
        # sshd insists on a full path to start itself again for each connection.
        config, key = spec.keys / "sshd_config", spec.keys / f"host_key_{node}"
        commands.append(["sshd", "-D", "-e", "-f", str(config), "-h", str(key)])
    return commands


def _silence(log: Path) -> None:
    """Orders and answers of the sandbox are not the node's; what an earlier boot logged is not this one's."""
    null, file = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(null, 0)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _own_mounts(spec: Spec, node: str) -> None:
    """/proc, /dev/shm and /run of its own; the last with a view of what all nodes share."""
    socket.sethostname(node)
    kernel.mount("none", Path("/"), flags=kernel.RECURSIVE | kernel.PRIVATE)
    kernel.mount("proc", Path("/proc"), "proc")
    kernel.mount("tmpfs", Path("/dev/shm"), "tmpfs", options=f"mode=1777,size={spec.shm}")
    run = Path("/run/lab/nodes") / node
    kernel.mount("tmpfs", run, "tmpfs", options="mode=755")
    kernel.mount("/run/lab", run / "lab", flags=kernel.BIND)
    kernel.mount(str(run), Path("/run"), flags=kernel.MOVE)
    for folder in ("sshd", "slurmd", "lock", "user"):
        Path("/run", folder).mkdir()


def _start(argv: list[str], log: Path) -> subprocess.Popen[bytes]:
    """In a session of its own, as from a real init."""
    program = Path("/usr/sbin", argv[0])
    with log.open("a") as output:
        return subprocess.Popen(
            [str(program), *argv[1:]],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd="/",
            env={"PATH": _PATH, "LANG": "C.UTF-8"},
        )
