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
from typing import Any

from tests.cluster import kernel, network
from tests.cluster.files import FAKE_GPU, MUNGE_SOCKET
from tests.cluster.node import boot
from tests.cluster.reaper import reap, wakeups
from tests.cluster.spec import LOGIN, Spec

LAB = Path("/run/lab")


def main(folder: Path) -> None:
    spec = Spec.read(folder)
    prepare(spec)
    inits: dict[str, int] = {}
    orders: dict[str, Callable[[str], Any]] = {
        "boot": lambda node: _boot(spec, node, inits),
        "power_off": lambda node: _power_off(spec, node, inits),
        "cut": lambda node: network.cable(spec, node, plugged=False),
        "heal": lambda node: network.cable(spec, node, plugged=True),
        "isolate": lambda node: network.isolate(spec, node, isolated=True),
        "join": lambda node: network.isolate(spec, node, isolated=False),
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
    for index in range(spec.gpus):
        # Slurm takes character devices only; these are clones of /dev/null.
        os.mknod(f"{FAKE_GPU}{index}", 0o666 | S_IFCHR, os.makedev(1, 3))
    network.build_switch(spec)
    if spec.slurm is not None:
        socket.sethostname(LOGIN)  # munged looks its host up
        key, log = spec.keys / "munge.key", spec.log / "munged.log"
        files = [f"--key-file={key}", f"--socket={MUNGE_SOCKET}", "--pid-file=/run/lab/munged.pid", f"--log-file={log}"]
        subprocess.run(["munged", "--force", *files, "--seed-file=/run/lab/munged.seed"], check=True)
    if spec.ssh:
        _make_ssh_keys(spec)


def _make_ssh_keys(spec: Spec) -> None:
    known = []
    for name in ("client_key", *(f"host_key_{node}" for node in spec.nodes)):
        argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(spec.keys / name)]
        subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)
    for node in spec.nodes:
        public = (spec.keys / f"host_key_{node}.pub").read_text()
        known.append(f"{node},{','.join(spec.address(node, each) for each in range(spec.networks))} {public}")
    (spec.keys / "known_hosts").write_text("".join(known))


def _boot(spec: Spec, node: str, inits: dict[str, int]) -> int:
    network.connect(spec, node)
    inits[node] = boot(spec, node)
    return inits[node]


def _power_off(spec: Spec, node: str, inits: dict[str, int]) -> None:
    """Silence first, as when the power goes: no FIN and no RST leave the node while its processes die."""
    network.cable(spec, node, plugged=False)
    init = inits.pop(node)
    with suppress(ProcessLookupError, ChildProcessError):  # a test has killed it already
        os.kill(init, signal.SIGKILL)
        os.waitpid(init, 0)
    network.disconnect(spec, node)


def _answer(value: Any, *, error: str | None = None) -> None:
    print(json.dumps({"value": value, "error": error}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
