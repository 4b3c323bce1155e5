"""Shared memory, a network and a cgroup for the tests of one process: what else runs on the machine meets no test.

Ours: pytest-socket forbids sockets and knows no namespaces, and no plugin of pytest knows of shared memory or cgroups.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pdserve.preflight.links import Interface, interfaces, is_loopback
from pdserve.system import cgroup, procfs
from pdserve.system.cgroup import Cgroup
from tests.cluster import kernel

PREFIX = f"pdserve-test-{os.getpid()}-"
"""Of the names that tests choose."""
_memory_is_separate = False


def separate_memory() -> None:
    """Gives this process, and those that it starts from now on, a /dev/shm of their own. Where that
    is not allowed (no CAP_SYS_ADMIN) the tests share them, and know their own by name."""
    global _memory_is_separate
    os.environ["PDSERVE_TEST_MEMORY"] = PREFIX
    room = os.statvfs(procfs.SHM)
    try:
        kernel.unshare(kernel.NEW_MOUNTS)
    except PermissionError:
        return
    kernel.mount("none", Path("/"), flags=kernel.RECURSIVE | kernel.SLAVE)
    size = f"mode=1777,size={room.f_blocks * room.f_frsize}"
    kernel.mount("tmpfs", procfs.SHM, "tmpfs", options=size)
    _memory_is_separate = True


def segments() -> set[str]:
    """Those that there are now and that a process of ours has made, as far as that can be known.

    Without semaphores: multiprocessing unlinks their names as soon as they are open.
    """
    names = {path.name for path in procfs.SHM.iterdir() if not path.name.startswith("sem.")}
    if not _memory_is_separate:
        return {name for name in names if name.startswith(PREFIX)}
    return names


_SIOCSIFADDR, _SIOCSIFFLAGS, _SIOCSIFNETMASK = 0x8916, 0x8914, 0x891C
_UP = 0x1
_IFREQ = struct.Struct("16s24s")  # struct ifreq: a name and a union of 24 bytes
_SOCKADDR = struct.Struct("=HH4s8x")


def separate_network() -> bool:
    """Gives this process, and those that it starts from now on, a network with loopback alone. The machine's other
    addresses are on it too, so that tests of an address find what they find without this. Where that is not allowed
    (no CAP_SYS_ADMIN) the tests share the machine's network; the answer says whether they do."""
    outside = [interface for interface in interfaces() if not is_loopback(interface.address)]
    try:
        kernel.unshare(kernel.NEW_NET)
    except PermissionError:
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        fcntl.ioctl(asking, _SIOCSIFFLAGS, _IFREQ.pack(b"lo", struct.pack("=H", _UP)))
        for number, interface in enumerate(outside):
            _add(asking, f"lo:{number}".encode(), interface)
    return True


def _add(asking: socket.socket, label: bytes, interface: Interface) -> None:
    """Without its neighbours: on loopback the kernel takes every address of a subnet for one of this machine."""
    fcntl.ioctl(asking, _SIOCSIFADDR, _request(label, socket.inet_aton(interface.address)))
    fcntl.ioctl(asking, _SIOCSIFNETMASK, _request(label, b"\xff" * 4))


def _request(label: bytes, address: bytes) -> bytes:
    return _IFREQ.pack(label, _SOCKADDR.pack(socket.AF_INET, 0, address))


_PREFIX = "pdserve-tests-"
_own: Path | None = None


@contextmanager
def separate_cgroup() -> Iterator[None]:
    """This process, and what it starts from now on, is in a cgroup of its own, if one can be made."""
    global _own
    try:
        home, _ = cgroup.place()
        for old in home.glob(f"{_PREFIX}*"):  # of a test process that was killed
            if not Path("/proc", old.name.removeprefix(_PREFIX)).exists():
                Cgroup.at(old).remove()
        made = home / f"{_PREFIX}{os.getpid()}"
        made.mkdir()
        _enter(made)
    except OSError:
        yield
        return
    _own = made
    try:
        yield
    finally:
        _enter(home)
        Cgroup.at(made).remove()


def cgroups() -> set[str]:
    """Names of the cgroups that agents of tests have made and that are still there."""
    return set() if _own is None else {each.name for each in _own.iterdir() if each.is_dir()}


def remove_cgroups(node: str) -> bool:
    """Remove the cgroups of a node that has lost its power; those of a test's node are this machine's. True once all of
    them are gone."""
    return _own is None or all(Cgroup.at(each).remove() for each in _own.glob(f"pdserve-*@{node}-*"))


def _enter(folder: Path) -> None:
    (folder / "cgroup.procs").write_bytes(b"0")
