"""Docker or podman on a node, with all that is its own on the node's /run.

Their programs are the machine's, or Debian's packages, unpacked and not installed.
"""

from __future__ import annotations

import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.cluster import Cluster
from tests.cluster.commands import NodeProcess
from tests.cluster.machine import docker_parent, unpacked
from tests.launch.deployment import wait_until

SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
"""Without /usr/local: a client that was put there belongs to no daemon of a node."""


def podman_layers() -> tuple[Path, ...]:
    """Return what must be laid over /usr so that a node has podman with runc."""
    return _layers("podman", ("podman", "runc", "catatonit"), ("podman", "conmon", "runc", "catatonit"))


def docker_layers() -> tuple[Path, ...]:
    """Return what must be laid over /usr so that a node has docker."""
    programs = ("dockerd", "docker", "containerd", "containerd-shim-runc-v2", "runc", "docker-init")
    return _layers("docker", ("docker.io",), programs)


def _layers(name: str, packages: tuple[str, ...], programs: tuple[str, ...]) -> tuple[Path, ...]:
    """Nothing where the machine has them. Raises LabError where there is no way to have them."""
    if all(shutil.which(program, path=SYSTEM_PATH) for program in programs):
        return ()
    return (unpacked(name, *packages),)


_LIMIT = 120.0


class Docker:
    """A daemon that can be killed, stopped and started again; ends with the node."""

    def __init__(self, cluster: Cluster, node: str, log: Path, *, options: Sequence[str] = ()) -> None:
        """`options`: further ones of dockerd."""
        self._options = options
        self._cluster = cluster
        self._node = node
        self._log = log
        self._environment = {"PATH": SYSTEM_PATH}
        self._daemon: NodeProcess | None = None
        self._mounts: set[str] = set()
        """When it was started for the first time."""
        cluster.output(node, ["mount", "-t", "tmpfs", "none", "/etc/docker"])

    def start(self) -> None:
        """Returns once it answers."""
        with self._log.open("a") as log:
            self._daemon = self._cluster.popen(
                self._node,
                [
                    *("dockerd", "--host=unix:///run/docker.sock", "--pidfile=/run/docker.pid"),
                    *("--data-root=/run/docker-data", "--exec-root=/run/docker", "--storage-driver=vfs"),
                    # The node's network is all that there is, and nothing of the kernel's tables is touched.
                    *("--bridge=none", "--iptables=false", "--ip-forward=false", "--ip-masq=false"),
                    f"--cgroup-parent={docker_parent(self._node)}",
                    *self._options,
                ],
                env=self._environment,
                stdout=log,
                stderr=log,
            )
        wait_until("docker answers", self._answers, _LIMIT, why=lambda: self._log.read_text()[-3000:])
        self._mounts = self._mounts or self._mount_points()

    def _answers(self) -> bool:
        assert self._daemon is not None
        assert self._daemon.poll() is None, self._log.read_text()[-3000:]
        return self.call("version").returncode == 0

    def send(self, signum: int) -> None:
        assert self._daemon is not None
        self._daemon.send_signal(signum)

    def end(self, signum: int) -> None:
        """KILL: its containers live on, as they do after a crash. TERM: it ends them."""
        self.send(signum)
        assert self._daemon is not None
        self._daemon.wait(_LIMIT)
        self._daemon = None

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """Its containerd, and with it the containers, go on."""
        self.send(signal.SIGSTOP)
        try:
            yield
        finally:
            self.send(signal.SIGCONT)

    @property
    def lives(self) -> bool:
        return self._daemon is not None

    def call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`docker ARGUMENTS` on the node."""
        return self._cluster.run(self._node, ["docker", *arguments], env=self._environment)

    def output(self, *arguments: str) -> str:
        """Return the output of a command that must succeed."""
        done = self.call(*arguments)
        assert done.returncode == 0, f"docker {' '.join(arguments)}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def new_mounts(self) -> set[str]:
        """Mount points of the node that were not there at the daemon's first start; the network of the node itself has
        one from its first container on."""
        return self._mount_points() - self._mounts - {"/run/docker/netns/default"}

    def _mount_points(self) -> set[str]:
        lines = self._cluster.output(self._node, ["cat", "/proc/self/mountinfo"]).splitlines()
        return {line.split()[4] for line in lines}

    def containers(self) -> list[str]:
        """Ids of all that there are, ended ones too."""
        return self.output("ps", "--all", "--quiet", "--no-trunc").split()


_SETTINGS = """
[containers]
default_ulimits = []
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "none"
tmp_dir = "/run/podman/tmp"
[network]
network_config_dir = "/run/podman/networks"
"""
_STORAGE = """
[storage]
driver = "vfs"
graphroot = "/run/podman/images"
runroot = "/run/podman/run"
"""
_POLICY = '{"default": [{"type": "insecureAcceptAnything"}]}'
_SCRIPT = """#!/bin/sh
export HOME={home} CONTAINERS_CONF={home}/containers.conf CONTAINERS_STORAGE_CONF={home}/storage.conf
exec podman "$@"
"""


class Podman(Docker):
    """All that it has is on the node's /run."""

    def __init__(self, cluster: Cluster, node: str, folder: Path) -> None:
        super().__init__(cluster, node, folder / "podman.log")
        self.programs = folder / "bin"
        """For PATH: `docker` is in it."""
        policy = folder / ".config/containers/policy.json"
        policy.parent.mkdir(parents=True)
        self.programs.mkdir()
        policy.write_text(_POLICY)
        (folder / "containers.conf").write_text(_SETTINGS)
        (folder / "storage.conf").write_text(_STORAGE)
        script = self.programs / "docker"
        script.write_text(_SCRIPT.format(home=folder))
        script.chmod(0o755)
        self._environment["PATH"] = f"{self.programs}:{self._environment['PATH']}"

    def start(self) -> None:
        """There is nothing to start; what its first call mounts stays with the node."""
        self.output("ps")
        self._mounts = self._mounts or self._mount_points()

    @property
    def lives(self) -> bool:
        return True

    def added_to(self, recipe: Path) -> Path:
        """The recipe with what podman needs besides: once one limit is named, it raises that of processes by itself;
        and cgroups that the cluster removes."""
        processes = resource.getrlimit(resource.RLIMIT_NPROC)[1]
        ours = [f"--ulimit=nproc={processes}:{processes}", f"--cgroup-parent={docker_parent(self._node)}"]
        text = recipe.read_text()
        assert text.count("  options:\n") == 1
        recipe.write_text(
            text.replace("  options:\n", "\n".join(["  options:", *(f"  - {each}" for each in ours), ""]))
        )
        return recipe
