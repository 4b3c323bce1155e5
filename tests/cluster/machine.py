"""What a machine must have for a cluster, told before anything starts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.cluster.errors import LabError

FREEZER = Path("/sys/fs/cgroup/freezer")
UNIFIED = (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))
"""Where cgroup v2 is, beside v1 or alone."""
_CAPABILITIES = {"CAP_SYS_ADMIN": 21, "CAP_NET_ADMIN": 12, "CAP_MKNOD": 27}
_TOOLS = {
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "ip": "iproute2",
    "bridge": "iproute2",
    "ss": "iproute2",
}


def check_machine(*, slurm: bool, status: Path = Path("/proc/self/status"), freezer: Path = FREEZER) -> None:
    """Raises LabError with everything that is missing."""
    missing = [f"{tool} (package {package})" for tool, package in _TOOLS.items() if shutil.which(tool) is None]
    missing += [f"{name} (run as root, in a container with --privileged)" for name in _lacking(status)]
    if slurm and not os.access(freezer, os.W_OK):
        # With proctrack/linuxproc instead, signals reach other processes than in production.
        missing.append(f"a writable cgroup v1 freezer at {freezer}, by which Slurm 22.05 tracks processes")
    if missing:
        raise LabError("this machine cannot hold a cluster; it lacks " + "; ".join(missing))


def _lacking(status: Path) -> list[str]:
    lines = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
    effective = int(lines["CapEff"], 16)
    return [name for name, bit in _CAPABILITIES.items() if not effective >> bit & 1]
