"""PID 1 of a cluster's sandbox: `python -m tests.cluster.sandbox FOLDER`, inside of new namespaces.

Lays the packages over /usr and the cluster's files over /etc, where only the sandbox sees them, builds the network,
boots the nodes, then does what lines of JSON on stdin say. Everything ends with it: at the end of stdin it exits.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from stat import S_IFCHR
from types import FrameType
from typing import Any

from tests.cluster import kernel
from tests.cluster.spec import FAKE_GPU, GPUS, LOGIN, MUNGE_SOCKET, Spec


def wakeups() -> int:
    """A descriptor that becomes readable when a child has ended."""
    read_end, writing = os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    signal.signal(signal.SIGCHLD, _note)
    return read_end


def _note(signum: int, frame: FrameType | None) -> None:
    """Only its being there matters: the number goes to the descriptor."""


def reap(woken: int) -> list[int]:
    """Collects all that have ended; their PIDs."""
    os.read(woken, 4096)
    ended: list[int] = []
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append(pid)


NAMESPACES = Path("/run/netns")


def build_switch(spec: Spec) -> None:
    """A bridge; the login node has its address there."""
    _ip("netns", "add", LOGIN)
    _ip("-n", LOGIN, "link", "set", "lo", "up")
    _ip("-n", LOGIN, "link", "add", "br0", "type", "bridge")
    _ip("-n", LOGIN, "addr", "add", f"{spec.address(LOGIN)}/24", "dev", "br0")
    _ip("-n", LOGIN, "link", "set", "br0", "up")


def connect(spec: Spec, node: str) -> None:
    """A network namespace with loopback and a cable to the bridge."""
    if node == LOGIN:
        return
    _ip("netns", "add", node)
    _ip("-n", node, "link", "set", "lo", "up")
    # A machine has its hardware address for life: peers do not ask again after a reboot.
    mac = ":".join(f"{octet:02x}" for octet in (2, 0, *map(int, spec.address(node).split("."))))
    link = ("link", "add", _port(node), "netns", LOGIN, "type", "veth")
    _ip(*link, "peer", "name", "eth0", "address", mac, "netns", node)
    _ip("-n", LOGIN, "link", "set", _port(node), "master", "br0", "up")
    _ip("-n", node, "addr", "add", f"{spec.address(node)}/24", "dev", "eth0")
    _ip("-n", node, "link", "set", "eth0", "up")


def disconnect(node: str) -> None:
    """Forget the node's connections: what a peer sends them after the next boot is answered with RST."""
    _ip("-n", LOGIN, "link", "del", _port(node))
    _ip("netns", "del", node)


def cable(node: str, *, plugged: bool) -> None:
    """Plug or pull a cable at the switch's end, so that peers and the node itself see silence and no error."""
    _ip("-n", LOGIN, "link", "set", _port(node), "up" if plugged else "down")


def isolate(node: str, *, isolated: bool) -> None:
    """Let isolated nodes not reach each other, only the others and the login node."""
    _run_tool("bridge", "-n", LOGIN, "link", "set", "dev", _port(node), "isolated", "on" if isolated else "off")


def _port(node: str) -> str:
    """Return the switch's end of a node's cable."""
    return f"{node}e0"


def _ip(*arguments: str) -> None:
    _run_tool("ip", *arguments)


def _run_tool(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")


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
    """Go into the namespaces, as the forked helper, and fork the node's first process, whose orphaning to the
    sandbox's first process is what keeps it waitable there."""
    code = 1
    try:
        kernel.enter(NAMESPACES / node, kernel.NEW_NET)
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
    if node != LOGIN:
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
    kernel.mount("tmpfs", Path("/dev/shm"), "tmpfs", options="mode=1777,size=3g")
    run = Path("/run/lab/nodes") / node
    kernel.mount("tmpfs", run, "tmpfs", options="mode=755")
    kernel.mount("/run/lab", run / "lab", flags=kernel.BIND)
    kernel.mount(str(run), Path("/run"), flags=kernel.MOVE)
    for folder in ("sshd", "slurmd", "lock", "user"):
        Path("/run", folder).mkdir()


def _start(argv: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a daemon in a session of its own, as a real init does."""
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


LAB = Path("/run/lab")


def main(folder: Path) -> None:
    spec = Spec.read(folder)
    prepare(spec)
    inits: dict[str, int] = {}
    orders: dict[str, Callable[[str], Any]] = {
        "boot": lambda node: _boot(spec, node, inits),
        "power_off": lambda node: _power_off(node, inits),
        "cut": lambda node: cable(node, plugged=False),
        "heal": lambda node: cable(node, plugged=True),
        "isolate": lambda node: isolate(node, isolated=True),
        "join": lambda node: isolate(node, isolated=False),
    }
    woken = wakeups()
    _answer(None)
    pending = b""
    while True:
        ready, _, _ = select.select([0, woken], [], [])
        if woken in ready:
            reap(woken)
        if 0 in ready:
            received = os.read(0, 65536)
            if not received:
                return
            *lines, pending = (pending + received).split(b"\n")
            for line in lines:
                verb, node = json.loads(line)
                try:
                    _answer(orders[verb](node))
                except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
                    _answer(None, error=f"{verb} {node}: {error}")


def prepare(spec: Spec) -> None:
    """Everything that all nodes see: programs, configuration, keys, devices, the switch."""
    layers = ":".join(f"{folder}/usr" for folder in (*spec.layers, spec.packages))
    kernel.mount("overlay", Path("/usr"), "overlay", options=f"lowerdir={layers}:/usr")
    kernel.mount("overlay", Path("/etc"), "overlay", options=f"lowerdir={spec.etc}:/etc")
    kernel.mount("tmpfs", Path("/run"), "tmpfs", options="mode=755")
    for name in ("dev", "nodes"):
        (LAB / name).mkdir(parents=True)
    for index in range(GPUS):
        # Slurm takes character devices only; these are clones of /dev/null.
        os.mknod(f"{FAKE_GPU}{index}", 0o666 | S_IFCHR, os.makedev(1, 3))
    build_switch(spec)
    if spec.slurm is not None:
        socket.sethostname(LOGIN)  # munged looks its host up
        key, log = spec.keys / "munge.key", spec.log / "munged.log"
        files = [f"--key-file={key}", f"--socket={MUNGE_SOCKET}", "--pid-file=/run/lab/munged.pid", f"--log-file={log}"]
        subprocess.run(["munged", "--force", *files, "--seed-file=/run/lab/munged.seed"], check=True)
    _make_ssh_keys(spec)


def _make_ssh_keys(spec: Spec) -> None:
    known = []
    for name in ("client_key", *(f"host_key_{node}" for node in spec.nodes)):
        argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(spec.keys / name)]
        subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)
    for node in spec.nodes:
        public = (spec.keys / f"host_key_{node}.pub").read_text()
        known.append(f"{node},{spec.address(node)} {public}")
    (spec.keys / "known_hosts").write_text("".join(known))


def _boot(spec: Spec, node: str, inits: dict[str, int]) -> int:
    connect(spec, node)
    inits[node] = boot(spec, node)
    return inits[node]


def _power_off(node: str, inits: dict[str, int]) -> None:
    """Silence first, as when the power goes: no FIN and no RST leave the node while its processes die."""
    cable(node, plugged=False)
    init = inits.pop(node)
    with suppress(ProcessLookupError, ChildProcessError):  # a test has killed it already
        os.kill(init, signal.SIGKILL)
        os.waitpid(init, 0)
    disconnect(node)


def _answer(value: Any, *, error: str | None = None) -> None:
    print(json.dumps({"value": value, "error": error}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
