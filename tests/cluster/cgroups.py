"""Cgroups that slurmd, docker and agents make, the only thing of a cluster outside of its sandbox.

An agent removes its own; one whose node was cut off the power did not. A container's are removed by its daemon, while
that lives.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from tests.cluster.machine import FREEZER, UNIFIED

_GONE_SECONDS = 120.0
_DOCKER = "pdserve-docker-"


def docker_parent(node: str) -> str:
    """In which a docker daemon of a node has those of its containers (--cgroup-parent)."""
    return f"/{_DOCKER}{node}"


def cgroups(prefix: str) -> list[Path]:
    """Those of a cluster's nodes, the innermost first."""
    folders: list[Path] = []
    agents = [top for mount in UNIFIED for top in mount.glob(f"pdserve-*@{prefix}[0-9]*")]
    mounts = [*UNIFIED, *(folder for folder in FREEZER.parent.iterdir() if folder.is_dir())]
    containers = [top for mount in mounts for top in mount.glob(f"{_DOCKER}{prefix}[0-9]*")]
    for top in (*FREEZER.glob(f"slurm_{prefix}[0-9]*"), *agents, *containers):
        folders += [Path(folder) for folder, _, _ in os.walk(top, topdown=False)]
    return folders


def remove_cgroups(prefix: str) -> None:
    """Removes them as their processes end; raises OSError when some are still held after 20 s."""
    deadline = time.monotonic() + _GONE_SECONDS
    while left := cgroups(prefix):
        _thaw(left)
        for folder in left:
            try:
                folder.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
                break


def _thaw(folders: list[Path]) -> None:
    """Of a container that a test has paused and that was killed since: what is frozen does not die."""
    for folder in folders:
        with suppress(FileNotFoundError):
            if folder.is_relative_to(FREEZER):
                (folder / "freezer.state").write_text("THAWED")
