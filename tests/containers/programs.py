"""Programs of docker and podman: those of the machine, or Debian's packages, unpacked and not installed."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.cluster.packages import CACHE, PackageSet, unpacked

SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
"""Without /usr/local: a client that was put there belongs to no daemon of a node."""
_PROGRAMS = ("dockerd", "docker", "containerd", "containerd-shim-runc-v2", "runc", "docker-init")
_PACKAGES = PackageSet(("docker.io",), programs=("sbin/dockerd", "bin/docker", "bin/containerd", "bin/docker-init"))


_PODMAN = PackageSet(
    ("podman", "runc", "catatonit"), programs=("bin/podman", "bin/conmon", "sbin/runc", "bin/catatonit")
)


def podman_layers() -> tuple[Path, ...]:
    """The same for podman with runc."""
    if all(shutil.which(program, path=SYSTEM_PATH) for program in ("podman", "conmon", "runc", "catatonit")):
        return ()
    return (unpacked(CACHE.parent / "podman", _PODMAN),)


def docker_layers() -> tuple[Path, ...]:
    """What must be laid over /usr so that a node has docker; nothing where the machine has it. Raises LabError where
    there is no way to have it."""
    if all(shutil.which(program, path=SYSTEM_PATH) for program in _PROGRAMS):
        return ()
    return (unpacked(CACHE.parent / "docker", _PACKAGES),)
