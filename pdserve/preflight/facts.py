"""The facts of a node: gathered there, compared and planned with where pdserve was called."""

from __future__ import annotations

import functools
import hashlib
import os
import platform as running_on
import re
import resource
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pdserve
from pdserve.errors import PreflightError
from pdserve.installed.versions import Versions
from pdserve.plan.environment import DEVICE_VARIABLES
from pdserve.plan.model import Frozen
from pdserve.preflight.engine_packages import read_versions
from pdserve.preflight.links import Interface, interfaces, route_source
from pdserve.system import host
from pdserve.system.host import MemoryFacts

_CAP_IPC_LOCK = 14
_NO_DEVICES = ("", "-1", "NoDevFiles", "none", "void")


class Limit(Frozen):
    """Holds a resource limit; None: unlimited."""

    soft: int | None
    hard: int | None


class NodeFacts(Frozen):
    """Facts of one node at one moment. Sizes in bytes."""

    hostname: str
    kernel: str
    python: str
    interpreter: str
    pdserve_version: str
    pdserve_digest: str
    """The digest of the source files that run there: two checkouts of one version differ here."""
    versions: Versions
    """In the environment of the engines."""
    versions_problem: str | None = None
    """Why nothing is known of them."""
    unix_time: float
    """The node's clock at the end of the gathering."""
    gather_seconds: float
    """How long the gathering took, which is no part of the way there and back."""
    interfaces: tuple[Interface, ...]
    routes: dict[str, str | None]
    """Target -> the address from which it would be reached; None: no route, or no such name."""
    devices_present: tuple[int, ...]
    """Ids that the driver shows."""
    devices_visible: tuple[int, ...]
    """Ids that this job may use."""
    device_variables: dict[str, str]
    memory: MemoryFacts
    memory_total: int
    memlock: Limit
    """The limit of what the agent starts: children inherit it."""
    ipc_lock: bool
    """CAP_IPC_LOCK: the memlock limit does not bind."""
    open_files: Limit

    @property
    def pdserve(self) -> str:
        """Return the version of pdserve and the digest of its code."""
        return f"{self.pdserve_version} ({self.pdserve_digest})"


def own_pdserve() -> str:
    """Return version and code of the pdserve that runs here."""
    return f"{pdserve.__version__} ({source_digest()})"


def gather(
    *,
    platform: str,
    targets: Sequence[str] = (),
    python: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> NodeFacts:
    """Gather the facts of this machine.

    `targets`: names or addresses of the other nodes. `python`: the interpreter of the engines (engine.python); None:
    the one that runs this."""
    began = time.monotonic()
    present = host.devices(platform)
    setting = {name: environ[name] for name in DEVICE_VARIABLES if name in environ}
    versions, problem = _versions(python)
    return NodeFacts(
        hostname=socket.gethostname(),
        kernel=running_on.release(),
        python=running_on.python_version(),
        interpreter=sys.executable,
        pdserve_version=pdserve.__version__,
        pdserve_digest=source_digest(),
        versions=versions,
        versions_problem=problem,
        interfaces=interfaces(),
        routes={target: route_source(target) for target in targets},
        devices_present=present,
        devices_visible=visible_devices(platform, present, setting),
        device_variables=setting,
        memory=host.memory(),
        memory_total=_memory_total(),
        memlock=_limit(resource.RLIMIT_MEMLOCK),
        ipc_lock=_has_capability(_CAP_IPC_LOCK) and _in_first_user_namespace(),
        open_files=_limit(resource.RLIMIT_NOFILE),
        gather_seconds=time.monotonic() - began,
        unix_time=time.time(),
    )


@functools.cache
def source_digest() -> str:
    """Return a digest of every file of the package that decides what it does."""
    root = Path(pdserve.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(path for kind in ("*.py", "*.json") for path in root.rglob(kind)):
        digest.update(f"{file.relative_to(root)}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def visible_devices(platform: str, present: Sequence[int], setting: Mapping[str, str]) -> tuple[int, ...]:
    """Return the ids of `present` that a job may use under these variables, in the ids of the bare machine.

    A batch system narrows a job down by variables, and not all by the same ones: Slurm sets CUDA_VISIBLE_DEVICES, on
    sites without NVIDIA's autodetection ROCR_VISIBLE_DEVICES and GPU_DEVICE_ORDINAL beside it with the same ids. Where
    the driver shows no device at all the variables count as right. An entry that is no number (a UUID) is not compared
    here and hides nothing.
    """
    if platform == "cpu":
        return ()
    allowed = _ids(setting.get("CUDA_VISIBLE_DEVICES"))
    if platform == "rocm":
        # HIP's runtime reads the CUDA name where its own is not set.
        second = _ids(setting.get("HIP_VISIBLE_DEVICES", setting.get("CUDA_VISIBLE_DEVICES")))
        allowed = _composed(_ids(setting.get("ROCR_VISIBLE_DEVICES")), second)
    if allowed is None:
        return tuple(present)
    return tuple(device for device in allowed if device in present) if present else allowed


def _composed(first: tuple[int, ...] | None, second: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Compose two lists of visible devices. ROCm numbers anew what ROCR_VISIBLE_DEVICES has left, and the second
    variable counts in those numbers. The same list in both is a batch system's, which means the bare machine's ids
    twice."""
    if first is None or second is None or first == second:
        return second if first is None else first
    return tuple(first[index] for index in second if index < len(first))


def _ids(text: str | None) -> tuple[int, ...] | None:
    """Read the ids of a variable; None where it is not set, or is nothing that can be understood."""
    if text is None:
        return None
    if text.strip() in _NO_DEVICES:
        return ()
    words = [word.strip() for word in text.split(",")]
    return tuple(dict.fromkeys(int(word) for word in words)) if all(word.isdigit() for word in words) else None


def _versions(python: str | None) -> tuple[Versions, str | None]:
    try:
        return read_versions(python), None
    except PreflightError as error:
        return Versions(), error.what


def _limit(which: int) -> Limit:
    soft, hard = (None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(which))
    return Limit(soft=soft, hard=hard)


def _memory_total() -> int:
    match = re.search(r"^MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(match.group(1)) * 1024 if match else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _has_capability(number: int) -> bool:
    match = re.search(r"^CapEff:\s+([0-9a-f]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return match is not None and bool(int(match.group(1), 16) >> number & 1)


def _in_first_user_namespace() -> bool:
    """Tell whether this process is in the first user namespace: a capability in any other (a rootless container) means
    nothing to the machine's own limits."""
    return Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]
