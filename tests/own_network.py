"""A network of this process alone: ports, abstract sockets and addresses that no other program of the machine uses.

Ours: pytest-socket forbids sockets, and knows no namespaces.
"""

from __future__ import annotations

import fcntl
import socket
import struct

from pdserve.preflight.interfaces import Interface, interfaces, is_loopback
from tests.cluster import kernel

_SIOCSIFADDR, _SIOCSIFFLAGS, _SIOCSIFNETMASK = 0x8916, 0x8914, 0x891C
_UP = 0x1
_IFREQ = struct.Struct("16s24s")  # struct ifreq: a name and a union of 24 bytes
_SOCKADDR = struct.Struct("=HH4s8x")


def separate() -> bool:
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
