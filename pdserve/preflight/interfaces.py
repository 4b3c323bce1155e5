"""The IPv4 addresses of this machine by interface, and the one from which it would reach another."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct

from pdserve.plan.model import Frozen

_SIOCGIFCONF, _SIOCGIFFLAGS, _SIOCGIFNETMASK, _SIOCGIFMTU = 0x8912, 0x8913, 0x891B, 0x8921
_SIOCETHTOOL, _SETTINGS, _DRIVER = 0x8946, 0x1, 0x3
_SETTINGS_BYTES, _DRIVER_BYTES = 44, 196  # struct ethtool_cmd and ethtool_drvinfo of linux/ethtool.h
_NO_LINK = frozenset({"veth", "tun"})
"""Drivers that have no link, and state 10 Gbit/s for it."""
_UP_AND_RUNNING = 0x1 | 0x40
_IFREQ = struct.Struct("16s16s8x")  # struct ifreq: a name and a union of 24 bytes
_SOCKADDR = struct.Struct("=HH4s8x")
_DISCARD = 9


class Interface(Frozen):
    """One address of an interface; an interface with several is there several times."""

    name: str
    address: str
    prefix: int
    """Bits of the network part."""
    up: bool
    """Whether it is switched on and has a link."""

    def __str__(self) -> str:
        return f"{self.name} {self.address}/{self.prefix}" + ("" if self.up else " (down)")


def interfaces() -> tuple[Interface, ...]:
    """In the kernel's order, which is stable. No tool is needed: images often have no iproute2."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        return tuple(
            Interface(name=name, address=address, prefix=_prefix(asking, name, address), up=_up(asking, name))
            for name, address in _addresses(asking)
        )


def _addresses(asking: socket.socket) -> list[tuple[str, str]]:
    room = 64 * _IFREQ.size
    while True:
        buffer = array.array("B", bytes(room))
        pointer, _ = buffer.buffer_info()
        request = fcntl.ioctl(asking, _SIOCGIFCONF, struct.pack("iP", room, pointer))
        used: int = struct.unpack("iP", request)[0]
        # A buffer that is full may have been too small: the kernel cuts without a word.
        if used <= room - _IFREQ.size:
            break
        room *= 2
    addresses = []
    for name, sockaddr in _IFREQ.iter_unpack(buffer.tobytes()[:used]):
        label = name.partition(b"\0")[0].decode()
        addresses.append((label, socket.inet_ntoa(_SOCKADDR.unpack(sockaddr)[2])))
    return addresses


def _prefix(asking: socket.socket, name: str, address: str) -> int:
    """The kernel looks for the name and the address, so that a second address gets its own mask."""
    wanted = _SOCKADDR.pack(socket.AF_INET, 0, socket.inet_aton(address))
    answer = fcntl.ioctl(asking, _SIOCGIFNETMASK, _IFREQ.pack(name.encode(), wanted))
    mask = socket.inet_ntoa(_SOCKADDR.unpack(_IFREQ.unpack(answer)[1])[2])
    return ipaddress.IPv4Network(f"0.0.0.0/{mask}").prefixlen


def _up(asking: socket.socket, name: str) -> bool:
    """Asked of the kernel rather than read from /sys, which may be that of another network namespace."""
    answer = fcntl.ioctl(asking, _SIOCGIFFLAGS, _IFREQ.pack(name.encode(), b""))
    flags: int = struct.unpack_from("=H", answer, 16)[0]
    return flags & _UP_AND_RUNNING == _UP_AND_RUNNING


def mtu(name: str) -> int | None:
    """Bytes of the largest packet of an interface; None: it is gone."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking, _SIOCGIFMTU, _IFREQ.pack(name.encode(), b""))
        except OSError:
            return None
    size: int = struct.unpack_from("=i", answer, 16)[0]
    return size


def speed(name: str) -> float | None:
    """10^9 bits a second that the link of an interface has been set to; None: it has none, or is not known."""
    driver, settings = _ethtool(name, _DRIVER, _DRIVER_BYTES), _ethtool(name, _SETTINGS, _SETTINGS_BYTES)
    if settings is None or (driver is not None and driver[4:36].rstrip(b"\0").decode() in _NO_LINK):
        return None
    low, high = (struct.unpack_from("=H", settings, at)[0] for at in (12, 28))
    megabits: int = low | high << 16
    return megabits / 1000 if 0 < megabits < 0xFFFF or 0xFFFF < megabits < 0xFFFFFFFF else None


def _ethtool(name: str, command: int, size: int) -> bytes | None:
    """The kernel's answer; None: the interface is gone, or its driver has none."""
    answer = array.array("B", struct.pack("=I", command).ljust(size, b"\0"))
    pointer, _ = answer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            fcntl.ioctl(asking, _SIOCETHTOOL, struct.pack("16sP16x", name.encode(), pointer))
        except OSError:
            return None
    return answer.tobytes()


def route_source(target: str) -> str | None:
    """The address that packets to `target` (a name or an address) would come from; None: no route, or no such name.

    Connecting a datagram socket asks the routing table and sends nothing.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((target, _DISCARD))
        except OSError:
            return None
        address: str = asking.getsockname()[0]
    return address


def is_loopback(address: str) -> bool:
    """Of an address or a host name, without a query over the network."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
