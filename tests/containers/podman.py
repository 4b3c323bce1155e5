"""Podman as a node's `docker`, as Debian's package podman-docker has it: a script of that name which calls it.

There is no daemon: each call does its work itself, and a conmon holds each container. Two things of Debian 12's podman
4.3.1 do not fit to a machine whose root may not raise limits, and whose cgroups are v1 beside an empty v2: it asks for
1048576 open files (`default_ulimits = []` keeps it from that), and its crun 1.8.1 refuses such cgroups (runc 1.1.5 does
not).
"""

from __future__ import annotations

import resource
from pathlib import Path

from tests.cluster.cgroups import docker_parent
from tests.cluster.cluster import Cluster
from tests.containers.daemon import Docker

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
