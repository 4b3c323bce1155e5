"""A cluster of nodes on this machine, for the time of a `with` block. See the package's docstring."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pdserve.system import procfs
from tests import isolation
from tests.cluster.commands import NodeProcess, Result, Stream, in_network, node_processes, node_segments
from tests.cluster.machine import CACHE, LabError, check_machine, claim_prefix, unpacked
from tests.cluster.spec import LOGIN, SlurmSettings, Spec, write_files
from tests.launch.deployment import wait_until

_ROOT = Path(__file__).resolve().parents[2]
_ANSWER_SECONDS, _DOWN_SECONDS = 120.0, 180.0


class SandboxLink:
    """Raises LabError when an order fails; the claim on the prefix passes to the keeper."""

    def __init__(self, spec: Spec, claim: socket.socket) -> None:
        self._spec = spec
        self._one = threading.Lock()
        self._log = spec.log / "sandbox.log"
        with self._log.open("w") as log, claim:
            self._keeper = subprocess.Popen(
                [sys.executable, "-S", "-m", "tests.cluster.keeper", str(os.getpid()), str(spec.folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=_ROOT,
                env={"PATH": f"/usr/sbin:/sbin:{os.environ['PATH']}", "PYTHONPATH": str(_ROOT), "LANG": "C.UTF-8"},
                pass_fds=[claim.fileno()],
                start_new_session=True,
            )
        self._answer("start")

    @property
    def keeper(self) -> int:
        return self._keeper.pid

    def order(self, verb: str, node: str) -> Any:
        assert self._keeper.stdin is not None
        with self._one:
            try:
                self._keeper.stdin.write(json.dumps([verb, node]).encode() + b"\n")
                self._keeper.stdin.flush()
            except BrokenPipeError:
                raise self._ended(f"{verb} {node}") from None
            return self._answer(f"{verb} {node}")

    def _answer(self, order: str) -> Any:
        assert self._keeper.stdout is not None
        ready, _, _ = select.select([self._keeper.stdout], [], [], _ANSWER_SECONDS)
        if not ready:
            raise LabError(f"{order}: no answer from the sandbox within {_ANSWER_SECONDS:.0f} s; see {self._log}")
        line = self._keeper.stdout.readline()
        if not line:
            raise self._ended(order)
        answer = json.loads(line)
        if answer["error"]:
            raise LabError(answer["error"])
        return answer["value"]

    def _ended(self, order: str) -> LabError:
        self._end()
        return LabError(f"{order}: the sandbox has ended:\n{self._log.read_text().strip()}")

    def host_pid(self, inner: int) -> int:
        """The PID that a node's first process, `inner` to the sandbox, has in the test process's eyes."""
        for pid in procfs.descendants(self.keeper):
            numbers = namespace_pids(pid)
            # In the machine's, the sandbox's and its own namespace.
            if numbers[-2:] == [inner, 1]:
                return pid
        raise LabError(f"the first process of a node, {inner} in the sandbox, has ended; see {self._spec.log}")

    def close(self) -> None:
        """Ends everything in the sandbox and returns when it is gone."""
        if code := self._end():
            raise LabError(f"the sandbox's keeper ended with {code}:\n{self._log.read_text().strip()}")

    def _end(self) -> int:
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        self._keeper.stdin.close()
        self._keeper.stdout.close()
        try:
            return self._keeper.wait(_DOWN_SECONDS)
        except subprocess.TimeoutExpired:
            self._keeper.kill()  # the sandbox dies with it
            return self._keeper.wait()


def namespace_pids(pid: int) -> list[int]:
    """A process's PID in each namespace from the reader's inwards; empty when it has ended."""
    try:
        lines = Path("/proc", str(pid), "status").read_text().splitlines()
    except OSError:
        return []
    return [int(word) for line in lines if line.startswith("NSpid:") for word in line.split()[1:]]


class Cluster:
    """Made by `Cluster.up`."""

    def __init__(self, spec: Spec, link: SandboxLink) -> None:
        self.spec = spec
        self._link = link
        self._inits: dict[str, int] = {}

    @classmethod
    @contextmanager
    def up(
        cls,
        nodes: int = 3,
        *,
        slurm: bool | SlurmSettings = True,
        layers: Sequence[Path] = (),
    ) -> Iterator[Cluster]:
        """`layers`: folders of further packages (`machine.unpacked`)."""
        settings = SlurmSettings() if slurm is True else slurm or None
        check_machine(slurm=settings is not None)
        packages = unpacked()
        prefix, claim = claim_prefix()
        with claim:
            folder = CACHE / "clusters" / prefix
            spec = Spec(prefix, nodes, folder, packages, settings, tuple(layers))
            write_files(spec)
            cluster = cls(spec, SandboxLink(spec, claim))
        try:
            for node in spec.everybody:
                cluster._boot(node)
            cluster.wait_idle()
            yield cluster
        finally:
            cluster._link.close()

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names, without the login node."""
        return self.spec.nodes

    @property
    def keeper(self) -> int:
        """The PID of the cluster's only direct child of the test process."""
        return self._link.keeper

    @property
    def ssh_config(self) -> Path:
        """Return the CONFIG of `ssh -F CONFIG NODE` on any node of the cluster."""
        return self.spec.keys / "config"

    def address(self, node: str) -> str:
        return self.spec.address(node)

    # Commands

    def run(
        self,
        node: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout: float = 180.0,
        stdin: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on a node, here and with our environment plus `env`, and captures what it says.

        Raises subprocess.TimeoutExpired after `timeout` seconds; a failure is in `returncode`.
        """
        source = subprocess.DEVNULL if stdin is None else subprocess.PIPE
        with self.popen(node, argv, env=env, cwd=cwd, stdin=source) as process:
            try:
                out, err = process.communicate(stdin, timeout)
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
        stdin: Stream = subprocess.DEVNULL,
        stdout: Stream = subprocess.PIPE,
        stderr: Stream = subprocess.PIPE,
    ) -> NodeProcess:
        """Starts a command on a node. Who starts it ends it; signals reach the program itself."""
        return NodeProcess(self._init(node), argv, env=env, cwd=cwd, stdin=stdin, stdout=stdout, stderr=stderr)

    def inside(self, node: str, work: Callable[[], Result]) -> Result:
        """Runs `work` of the test process in the network of a node. Sockets made there stay there."""
        return in_network(self._init(node), work)

    def connect(self, node: str, target: str, port: int, *, timeout: float = 60.0) -> socket.socket:
        """A TCP connection from a node to another (by name), held by the test process; seconds for it and each read."""
        address = self.address(target), port
        return self.inside(node, lambda: socket.create_connection(address, timeout))

    # Faults

    def cut(self, node: str) -> None:
        """Pulls the node's cables: silence in both directions, no error."""
        self._link.order("cut", node)

    def heal(self, node: str) -> None:
        self._link.order("heal", node)

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

    @contextmanager
    def isolated(self, *nodes: str) -> Iterator[None]:
        """They do not reach each other in a block; the others and the login node they do."""
        for node in nodes:
            self._link.order("isolate", node)
        try:
            yield
        finally:
            for node in nodes:
                self._link.order("join", node)

    def power_off(self, node: str) -> None:
        """Silence, then everything on the node is gone at once, with its /dev/shm, its cgroups and its connections."""
        self._link.order("power_off", node)
        del self._inits[node]
        wait_until(f"the cgroups of {node} are gone", lambda: isolation.remove_cgroups(node), 60)

    def power_on(self, node: str) -> None:
        """Returns when the node's daemons have been started; `wait_idle` waits for Slurm to see it."""
        self._boot(node)

    def _boot(self, node: str) -> None:
        self._inits[node] = self._link.host_pid(self._link.order("boot", node))
        if node != LOGIN:
            wait_until(f"sshd listens on {node}", lambda: self._listens(node), 120, why=self._logs)

    def _listens(self, node: str) -> bool:
        self._check_daemons()
        table = Path(f"/proc/{self._init(node)}/net/tcp").read_text()
        return ":0016 00000000:0000 0A" in table

    def _init(self, node: str) -> int:
        if node not in self._inits:
            raise LabError(f"{node} is powered off" if node in self.spec.everybody else f"there is no node {node}")
        return self._inits[node]

    # Slurm

    def wait_idle(self, nodes: Sequence[str] | None = None, *, timeout: float = 180.0) -> None:
        """Returns when Slurm has these nodes (all that are on) without a job and ready for one."""
        if self.spec.slurm is None:
            return
        wanted = {node for node in self._inits if node != LOGIN} if nodes is None else set(nodes)
        wait_until(f"{sorted(wanted)} idle", lambda: wanted <= self._idle(), timeout, why=self._logs)

    def _idle(self) -> set[str]:
        self._check_daemons()
        return {name for name, state in self.states().items() if state == "idle"}

    def _check_daemons(self) -> None:
        """Raise LabError for what will never come: nodes log the daemons that have ended."""
        if ended := [text for log in sorted(self.spec.log.glob("boot-*.log")) if (text := log.read_text().strip())]:
            raise LabError("\n".join(ended) + self._logs())

    def states(self) -> dict[str, str]:
        """Node -> what sinfo says (`idle`, `alloc`, `down*`, ...); empty while the controller does not answer."""
        done = self.run(LOGIN, ["sinfo", "-h", "-N", "-o", "%N %t"])
        return dict(line.split() for line in done.stdout.splitlines()) if done.returncode == 0 else {}

    def steps(self) -> list[str]:
        """Jobs and steps that Slurm still has, completing ones too; one text each."""
        if self.spec.slurm is None:
            return []
        jobs = self.output(LOGIN, ["squeue", "-h", "-a", "-o", "job %i %T on %N"])
        steps = self.output(LOGIN, ["squeue", "-h", "-a", "-s", "-o", "step %i on %N"])
        return [line.strip() for line in (*jobs.splitlines(), *steps.splitlines())]

    def _logs(self) -> str:
        """The end of each daemon's log."""
        parts = []
        for path in sorted(self.spec.log.iterdir()):
            if lines := path.read_text(errors="replace").splitlines()[-8:]:
                parts.append(f"== {path}\n" + "\n".join(lines))
        return "\n" + "\n".join(parts)

    # Leftovers

    def processes(self, node: str) -> list[tuple[int, list[str]]]:
        """(PID as the test process sees it, argv) of what runs on a node and is not the lab's own."""
        return node_processes(self._init(node))

    def segments(self, node: str) -> list[str]:
        """Names in the node's /dev/shm."""
        return node_segments(self._init(node))

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
        self.wait_idle(self.nodes)

    def reset(self) -> None:
        """Tidy up after a failed test: every node on and plugged in, nothing of the test on it, Slurm idle."""
        for node in self.nodes:
            if node not in self._inits:
                self.power_on(node)
            self.heal(node)
        if self.spec.slurm is not None:
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
