"""A cluster of nodes on this machine, for the time of a `with` block. See the package's docstring."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from tests import isolation
from tests.cluster import kernel
from tests.cluster.commands import (
    NodeProcess,
    Stream,
    entering,
    node_processes,
    only_child,
)
from tests.cluster.machine import CACHE, SLURM, LabError, check_machine, claim_prefix, remove_cgroups, unpacked
from tests.cluster.spec import FAKE_GPU, GPUS, LOGIN, MUNGE_SOCKET, write_files
from tests.launch.deployment import wait_until

Result = TypeVar("Result")
_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
_NAMESPACES = ("unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc")
_SANDBOX = f"""
set -e
mount -n -t overlay -o lowerdir="$layers:/usr" overlay /usr
mount -n -t overlay -o lowerdir="$folder/etc:/etc" overlay /etc
mount -n -t tmpfs -o mode=755 none /run
mkdir /run/lab
# Slurm takes character devices only; these are clones of /dev/null.
for gpu in $(seq 0 {GPUS - 1}); do mknod -m 666 {FAKE_GPU}$gpu c 1 3; done
ip link set lo up
ip link add br0 up type bridge
ip addr add $address/24 dev br0
ssh-keygen -q -t ed25519 -N "" -f $folder/key
echo "* $(cat $folder/key.pub)" > $folder/known_hosts
echo {LOGIN} > /proc/sys/kernel/hostname # munged looks its host up
if [ -e $folder/munge.key ]; then
    munged --force --key-file=$folder/munge.key --socket={MUNGE_SOCKET} --pid-file=/run/lab/munged.pid \
        --seed-file=/run/lab/munged.seed --log-file=$folder/log/munged.log
fi
echo up
exec sleep infinity
"""
"""Its first process: packages over /usr and the cluster's files over /etc, where only it sees them, and the switch."""
_NODE = """
set -e
echo $node > /proc/sys/kernel/hostname
mount -n -t tmpfs -o mode=1777,size=3g none /dev/shm
mkdir -p /run/lab/$node
mount -n -t tmpfs -o mode=755 none /run/lab/$node
mkdir /run/lab/$node/{lab,sshd,slurmd,lock,user}
mount -n --bind /run/lab /run/lab/$node/lab
mount -n --move /run/lab/$node /run
cd /
echo up
until [ $node = pdctl ] || ip link show eth0 2> /dev/null | grep -q LOWER_UP; do sleep 0.01; done
start() {
    env --default-signal=INT,QUIT setsid /usr/sbin/"$@" < /dev/null >> $folder/log/$1-$node.out 2>&1 &
}
for daemon in $daemons; do
    case $daemon in
    slurmctld) start slurmctld -D -i ;;
    slurmd) start slurmd -D -N $node ;;
    sshd) start sshd -D -e -f $folder/sshd_config ;;
    esac
done
if [ "$daemons" ]; then
    wait -n || true
    echo a daemon of $node has ended >&2
fi
exec sleep infinity
"""
"""Its first process: /proc, /dev/shm and /run of its own, the last with a view of what all nodes share; the daemons,
once it has its cable."""


class Cluster:
    """Made by `Cluster.up`."""

    def __init__(self, prefix: str, nodes: int, slurm: Sequence[str] | None) -> None:
        self.nodes = tuple(f"{prefix}{number}" for number in range(nodes))
        """Names, without the login node."""
        self.folder = CACHE / "cluster" / "clusters" / prefix
        self._slurm = slurm is not None
        self._addresses = {LOGIN: "10.77.0.1"} | {node: f"10.77.0.{10 + at}" for at, node in enumerate(self.nodes)}
        self._inits: dict[str, int] = {}
        self._holders: dict[str, subprocess.Popen[str]] = {}
        self._first = 0
        """The sandbox's first process."""
        write_files(self.folder, self._addresses, slurm)

    @classmethod
    @contextmanager
    def up(
        cls, nodes: int = 3, *, slurm: bool = True, more: Sequence[str] = (), layers: Sequence[Path] = ()
    ) -> Iterator[Cluster]:
        """`more`: further lines of slurm.conf; `layers`: folders of further packages (`machine.unpacked`)."""
        check_machine(slurm=slurm)
        packages = [*layers, unpacked("cluster", *SLURM)]
        prefix, claim = claim_prefix()
        with claim:
            remove_cgroups(prefix)
            cluster = cls(prefix, nodes, more if slurm else None)
            with cluster._sandbox(packages):
                cluster.wait_idle()
                yield cluster

    @contextmanager
    def _sandbox(self, layers: Sequence[Path]) -> Iterator[None]:
        """Everything in it ends with the block, and with the test process."""
        given = {"layers": ":".join(f"{each}/usr" for each in layers), "address": self._addresses[LOGIN]}
        argv = ("setpriv", "--pdeathsig", "KILL", *_NAMESPACES, "--net", "bash", "-c", _SANDBOX)
        sandbox = self._hold("sandbox", argv, given)
        try:
            self._answer("sandbox", "up")
            self._first = only_child(sandbox.pid)
            for node in self._addresses:
                self.power_on(node)
            yield
        finally:
            sandbox.kill()
            for process in self._holders.values():
                with process:
                    process.wait(180)
            remove_cgroups(self.nodes[0].removesuffix("0"))

    def _hold(self, name: str, argv: Sequence[str], given: Mapping[str, str]) -> subprocess.Popen[str]:
        """Start the process that has a node, or the sandbox, as its descendant, however often the node boots."""
        with (self.folder / "log" / f"boot-{name}.log").open("w") as log:
            self._holders[name] = subprocess.Popen(
                argv,
                env={**_ENVIRONMENT, **given, "folder": str(self.folder)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        return self._holders[name]

    def _answer(self, name: str, wanted: str) -> None:
        """Wait until it says so."""
        stdout = self._holders[name].stdout
        assert stdout is not None
        if stdout.readline() != f"{wanted}\n":
            raise LabError(f"{name} is not {wanted}: {self._logs()}")

    @property
    def ssh_config(self) -> Path:
        """Return the CONFIG of `ssh -F CONFIG NODE` on any node of the cluster."""
        return self.folder / "ssh_config"

    def address(self, node: str) -> str:
        return self._addresses[node]

    # Commands

    def run(
        self,
        node: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout: float = 180.0,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on a node, here and with our environment plus `env`, and captures what it says.

        Raises subprocess.TimeoutExpired after `timeout` seconds; a failure is in `returncode`.
        """
        with self.popen(node, argv, env=env, cwd=cwd) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            finally:
                # Whatever ends the wait, a timeout or Ctrl-C: the program does not outlive it.
                process.send_signal(signal.SIGKILL)
        return subprocess.CompletedProcess(list(argv), process.returncode, out, err)

    def output(self, node: str, argv: Sequence[str], *, timeout: float = 180.0) -> str:
        """The stripped stdout of a command that must succeed."""
        done = self.run(node, argv, timeout=timeout)
        assert done.returncode == 0, f"{' '.join(argv)} on {node}: exit {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout.strip()

    def popen(
        self,
        node: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdout: Stream = subprocess.PIPE,
        stderr: Stream = subprocess.PIPE,
    ) -> NodeProcess:
        """Starts a command on a node. Who starts it ends it; signals reach the program itself."""
        return NodeProcess(self._init(node), argv, env=env, cwd=cwd, stdout=stdout, stderr=stderr)

    def inside(self, node: str, work: Callable[[], Result]) -> Result:
        """Runs `work` in a thread that has gone into the network of a node; returns or raises what it does. Its sockets
        stay there. Only the network is the node's: names are not looked up in its /etc/hosts, so use addresses."""
        network = Path(f"/proc/{self._init(node)}/ns/net")

        def go() -> Result:
            kernel.enter(network, kernel.NEW_NET)
            return work()

        # A thread cannot be told apart from others by where it is, so this one serves once and ends.
        with ThreadPoolExecutor(1) as executor:
            return executor.submit(go).result()

    # Faults

    def _switch(self, *argv: str, at: int | None = None) -> None:
        network = f"--net=/proc/{at or self._first}/ns/net"
        subprocess.run(["nsenter", network, *argv], env=_ENVIRONMENT, check=True)

    def cut(self, node: str) -> None:
        """Pulls the node's cables: silence in both directions, no error."""
        self._switch("ip", "link", "set", f"{node}e0", "down")

    def heal(self, node: str) -> None:
        self._switch("ip", "link", "set", f"{node}e0", "up")

    @contextmanager
    def silent(self, *nodes: str) -> Iterator[None]:
        """They are cut off in a block."""
        for node in nodes:
            self.cut(node)
        try:
            yield
        finally:
            for node in nodes:
                self.heal(node)

    def power_off(self, node: str) -> None:
        """Silence, then everything on the node is gone at once, with its /dev/shm, its cgroups and its connections: no
        FIN and no RST leave it while its processes die."""
        self.cut(node)
        os.kill(self._inits.pop(node), signal.SIGKILL)
        self._answer(node, "off")
        with suppress(subprocess.CalledProcessError):  # it goes with the node's network, some time
            self._switch("ip", "link", "del", f"{node}e0")
        wait_until(f"the cgroups of {node} are gone", lambda: isolation.remove_cgroups(node), 60)

    def power_on(self, node: str) -> None:
        """Returns when the node's daemons have been started; `wait_idle` waits for Slurm to see it."""
        daemons = [("slurmctld" if node == LOGIN else "slurmd") if self._slurm else "", "" if node == LOGIN else "sshd"]
        given = {"node": node, "daemons": " ".join(filter(None, daemons)), "script": _NODE}
        if node not in self._holders:
            unshare = " ".join((*_NAMESPACES, "" if node == LOGIN else "--net"))
            loop = f'while read -r; do {unshare} bash -c "$script" < /dev/null; echo off; done'
            self._hold(node, [*entering(self._first), "bash", "-c", loop], given)
        holder = self._holders[node]
        assert holder.stdin is not None
        holder.stdin.write("boot\n")
        holder.stdin.flush()
        self._answer(node, "up")
        self._inits[node] = init = only_child(only_child(only_child(holder.pid)))
        if node != LOGIN:
            self._wire(node, init)
            wait_until(f"sshd listens on {node}", lambda: self._listens(node), 120, why=self._logs)

    def _wire(self, node: str, init: int) -> None:
        """A cable to the switch."""
        address = self._addresses[node]
        # A machine has its hardware address for life: peers do not ask again after a reboot.
        mac = ":".join(f"{octet:02x}" for octet in (2, 0, *map(int, address.split("."))))
        peer = ("peer", "name", "eth0", "address", mac, "netns", str(init))
        self._switch("ip", "link", "add", f"{node}e0", "type", "veth", *peer)
        self._switch("ip", "link", "set", f"{node}e0", "master", "br0", "up")
        for words in ("link set lo up", f"addr add {address}/24 dev eth0", "link set eth0 up"):
            self._switch("ip", *words.split(), at=init)

    def _listens(self, node: str) -> bool:
        self._check_daemons()
        return ":0016 00000000:0000 0A" in Path(f"/proc/{self._init(node)}/net/tcp").read_text()

    def _init(self, node: str) -> int:
        if node not in self._inits:
            raise LabError(f"there is no node {node}, or it is powered off")
        return self._inits[node]

    # Slurm

    def wait_idle(self) -> None:
        """Returns when Slurm has all nodes that are on without a job and ready for one."""
        if self._slurm:
            on = self._inits.keys() - {LOGIN}
            wait_until(f"{sorted(on)} idle", lambda: on <= self._idle(), 180, why=self._logs)

    def _idle(self) -> set[str]:
        self._check_daemons()
        done = self.run(LOGIN, ["sinfo", "-h", "-N", "-o", "%N %t"])
        return {line.split()[0] for line in done.stdout.splitlines() if line.endswith(" idle")}

    def _check_daemons(self) -> None:
        """Raise LabError for what will never come: nodes say which of them has lost a daemon."""
        if any("has ended" in log.read_text() for log in self.folder.glob("log/boot-*.log")):
            raise LabError(self._logs())

    def steps(self) -> list[str]:
        """Jobs and steps that Slurm still has, completing ones too; one text each."""
        if not self._slurm:
            return []
        jobs = self.output(LOGIN, ["squeue", "-h", "-a", "-o", "job %i %T on %N"])
        steps = self.output(LOGIN, ["squeue", "-h", "-a", "-s", "-o", "step %i on %N"])
        return [line.strip() for line in (*jobs.splitlines(), *steps.splitlines())]

    def _logs(self) -> str:
        """The end of each daemon's log."""
        parts = []
        for path in sorted((self.folder / "log").iterdir()):
            if lines := path.read_text(errors="replace").splitlines()[-8:]:
                parts.append(f"== {path}\n" + "\n".join(lines))
        return "\n" + "\n".join(parts)

    # Leftovers

    def processes(self, node: str) -> list[tuple[int, list[str]]]:
        """(PID as the test process sees it, argv) of what runs on a node and is not the lab's own."""
        return node_processes(self._init(node))

    def segments(self, node: str) -> list[str]:
        """Names in the node's /dev/shm, without semaphores: multiprocessing unlinks theirs as soon as they are open."""
        shm = Path(f"/proc/{self._init(node)}/root/dev/shm")
        return sorted(path.name for path in shm.iterdir() if not path.name.startswith("sem."))

    def left(self) -> list[str]:
        """Everything that a deployment has not taken away, one line each; nodes that are off have nothing."""
        lines = self.steps()
        for node in self._inits:
            lines += [f"{node}: process {pid} {' '.join(argv)}" for pid, argv in self.processes(node)]
            lines += [f"{node}: /dev/shm/{name}" for name in self.segments(node)]
        return lines

    def assert_nothing_left(self, *, timeout: float = 60.0) -> None:
        """Fails with what is still there after `timeout` seconds; cables must be plugged in."""
        wait_until("nothing left", lambda: not self.left(), timeout, why=lambda: "\n" + "\n".join(self.left()))
        self.wait_idle()

    def reset(self) -> None:
        """Tidy up after a failed test: every node on and plugged in, nothing of the test on it, Slurm idle."""
        for node in self.nodes:
            if node not in self._inits:
                self.power_on(node)
            self.heal(node)
        if self._slurm:
            self.output(LOGIN, ["scancel", "--user=root"])
        wait_until("nothing left after a reset", self._swept, 180, why=lambda: "\n" + "\n".join(self.left()))
        self.wait_idle()

    def _swept(self) -> bool:
        for node, init in self._inits.items():
            for pid, argv in self.processes(node):
                # Slurm ends a job's steps itself; without its own processes it would wait for them.
                if not argv[0].startswith("slurmstepd"):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            for name in self.segments(node):
                Path(f"/proc/{init}/root/dev/shm/{name}").unlink(missing_ok=True)
        return not self.left()
