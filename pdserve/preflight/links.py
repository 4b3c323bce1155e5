"""The links of this machine: its IPv4 interfaces, and its RDMA ports with what a connector needs of them.

Both are asked of the kernel, by ioctl and in /sys: images often have no iproute2, and no tool of OFED.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import re
import socket
import struct
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from pdserve.plan.model import Frozen
from pdserve.plan.process import Process
from pdserve.preflight.finding import Finding, NodeNeed, Status

_SIOCGIFCONF, _SIOCGIFFLAGS, _SIOCGIFNETMASK, _SIOCGIFMTU = 0x8912, 0x8913, 0x891B, 0x8921
_SIOCETHTOOL, _SETTINGS, _DRIVER = 0x8946, 0x1, 0x3
_SETTINGS_BYTES, _DRIVER_BYTES = 44, 196  # struct ethtool_cmd and ethtool_drvinfo of linux/ethtool.h
_NO_LINK = frozenset({"veth", "tun"})
"""Drivers that have no link, and state 10 Gbit/s for it."""
_UP_AND_RUNNING = 0x1 | 0x40
_IFREQ = struct.Struct("16s16s8x")  # struct ifreq: a name and a union of 24 bytes
_SOCKADDR = struct.Struct("=HH4s8x")
_DISCARD = 9

_RDMA = Path("/sys/class/infiniband")
_VERBS = Path("/dev/infiniband")
_MODULES = Path("/sys/module")
_PEER_MODULES = ("nvidia_peermem", "nv_peer_mem")
_RATE = re.compile(r"([\d.]+) Gb/sec")
_GID_INDEX = "MC_GID_INDEX"
"""Mooncake's choice among the GIDs of a port."""


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
    """Return all interfaces in the kernel's order, which is stable."""
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
    """Ask for the length of an address's prefix. The kernel looks for the name and the address, so that a second
    address gets its own mask."""
    wanted = _SOCKADDR.pack(socket.AF_INET, 0, socket.inet_aton(address))
    answer = fcntl.ioctl(asking, _SIOCGIFNETMASK, _IFREQ.pack(name.encode(), wanted))
    mask = socket.inet_ntoa(_SOCKADDR.unpack(_IFREQ.unpack(answer)[1])[2])
    return ipaddress.IPv4Network(f"0.0.0.0/{mask}").prefixlen


def _up(asking: socket.socket, name: str) -> bool:
    """Ask the kernel rather than /sys, which may be that of another network namespace."""
    answer = fcntl.ioctl(asking, _SIOCGIFFLAGS, _IFREQ.pack(name.encode(), b""))
    flags: int = struct.unpack_from("=H", answer, 16)[0]
    return flags & _UP_AND_RUNNING == _UP_AND_RUNNING


def mtu(name: str) -> int | None:
    """Return the bytes of the largest packet of an interface; None: it is gone."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking, _SIOCGIFMTU, _IFREQ.pack(name.encode(), b""))
        except OSError:
            return None
    size: int = struct.unpack_from("=i", answer, 16)[0]
    return size


def speed(name: str) -> float | None:
    """Return the 10^9 bits a second that the link of an interface was set to; None: it has none, or is not known."""
    driver, settings = _ethtool(name, _DRIVER, _DRIVER_BYTES), _ethtool(name, _SETTINGS, _SETTINGS_BYTES)
    if settings is None or (driver is not None and driver[4:36].rstrip(b"\0").decode() in _NO_LINK):
        return None
    low, high = (struct.unpack_from("=H", settings, at)[0] for at in (12, 28))
    megabits: int = low | high << 16
    return megabits / 1000 if 0 < megabits < 0xFFFF or 0xFFFF < megabits < 0xFFFFFFFF else None


def _ethtool(name: str, command: int, size: int) -> bytes | None:
    """Return the kernel's answer; None: the interface is gone, or its driver has none."""
    answer = array.array("B", struct.pack("=I", command).ljust(size, b"\0"))
    pointer, _ = answer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            fcntl.ioctl(asking, _SIOCETHTOOL, struct.pack("16sP16x", name.encode(), pointer))
        except OSError:
            return None
    return answer.tobytes()


def route_source(target: str) -> str | None:
    """Return the address that packets to `target` (a name or an address) come from; None: no route, or no such name.

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
    """Tell whether an address or a host name is loopback, without a query over the network."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


class RdmaPort(NamedTuple):
    """One port of an RDMA device."""

    device: str
    number: str
    state: str
    """As the kernel writes it: `4: ACTIVE`."""
    rate: str
    gids: tuple[int, ...] | None = None
    """Indexes of its addresses; None: the kernel does not show them."""

    @property
    def active(self) -> bool:
        return self.state.endswith("ACTIVE")

    def __str__(self) -> str:
        return f"{self.device} port {self.number}: {self.state}, {self.rate}"


def rdma_ports(sys: Path = _RDMA) -> list[RdmaPort]:
    """Return all ports, by device; none without RDMA devices. Raises OSError when the folder is there and cannot be
    read."""
    if not sys.is_dir():
        return []
    return [
        RdmaPort(device.name, port.name, _text(port / "state"), _text(port / "rate"), _gids(port / "gids"))
        for device in sorted(sys.iterdir())
        for port in sorted((device / "ports").iterdir())
    ]


def _gids(folder: Path) -> tuple[int, ...] | None:
    """Return the entries that are no zeroes. Those that were never set cannot be read."""
    if not folder.is_dir():
        return None
    texts = {file.name: _text(file) for file in folder.iterdir() if file.name.isdecimal()}
    return tuple(sorted(int(name) for name, text in texts.items() if text[4:5] == ":" and set(text) - set("0:")))


def _text(file: Path) -> str:
    """Read a state. One that cannot be read counts as not active."""
    try:
        return file.read_text().strip()
    except OSError as error:
        return f"unreadable ({error.strerror})"


def fastest_rdma(names: Collection[str], sys: Path = _RDMA) -> float | None:
    """Return the 10^9 bits a second of the fastest active port of these devices, or of all where none is named.

    None: there is no such port, or its rate cannot be read. A transfer may use several."""
    devices = {name.partition(":")[0] for name in names}
    try:
        usable = [port for port in rdma_ports(sys) if port.active and (not devices or port.device in devices)]
    except OSError:
        return None
    rates = [float(rate[1]) for port in usable if (rate := _RATE.match(port.rate))]
    return max(rates, default=None)


def find_rdma(node: str, starting: Collection[Process], *, sys: Path = _RDMA, verbs: Path = _VERBS) -> list[Finding]:
    """Judge the ports that connectors want; nothing where no connector wants RDMA."""
    wanted = [names for process in starting if (names := process.rdma_devices) is not None]
    if not wanted:
        return []
    named = sorted({name for names in wanted for name in names})
    text = f"an active port on each of {', '.join(named)}" if named else "an RDMA device with an active port"
    need = NodeNeed(node, "rdma", text, unverified=True)
    try:
        ports = rdma_ports(sys)
    except OSError as error:
        return [need.found("unknown", f"{sys} cannot be read: {error.strerror}")]
    index = next((number for process in starting if (number := process.env.set.get(_GID_INDEX))), None)
    status, value, fix = _judge(ports, named, verbs, index)
    return [need.found(status, value, fix, () if status == "ok" else [str(port) for port in ports])]


def _judge(
    ports: list[RdmaPort], named: list[str], verbs: Path, gid_index: str | None
) -> tuple[Status, str, str | None]:
    tcp = "or use the connector with protocol: tcp"
    if not ports:
        return "failed", "no RDMA device", f"load the driver of the adapters, {tcp}"
    if not any(verbs.glob("uverbs*")):
        fix = f"give the container the devices (docker: --device=/dev/infiniband), {tcp}"
        return "failed", f"devices that no process can open: no {verbs}/uverbs*", fix
    there = {port.device for port in ports}
    if absent := [name for name in named if name.partition(":")[0] not in there]:
        fix = f"correct device_name (of the connector or of mooncake_store): there are {', '.join(sorted(there))}"
        return "failed", f"no {', '.join(absent)}", fix
    active = {port.device for port in ports if port.active}
    wanted = {name.partition(":")[0] for name in named}
    if down := sorted(wanted - active) or (sorted(there) if not active else []):
        fix = f"bring the link up (cable, switch, subnet manager), {tcp}"
        return "failed", f"no active port on {', '.join(down)}", fix
    usable = [port for port in ports if port.active and (not wanted or port.device in wanted)]
    if without := [port for port in usable if port.gids is not None and not _has_gid(port.gids, gid_index)]:
        which = "no GID" if gid_index is None else f"no GID {gid_index} ({_GID_INDEX})"
        value = f"{which} on {', '.join(f'{port.device} port {port.number}' for port in without)}"
        fix = "give the network interface of the device an address (RoCE), or start the subnet manager (InfiniBand)"
        if gid_index is not None:
            shown = sorted({gid for port in without for gid in port.gids or ()})
            fix = f"set {_GID_INDEX} to one that is there: {', '.join(map(str, shown)) or 'none is'}; or {fix}"
        return "failed", value, f"{fix}, {tcp}"
    value = ", ".join(str(port) for port in ports if port.active)
    if not named and there - active:
        fix = "name the good ones in device_name (of the connector or of mooncake_store): any may be taken otherwise"
        return "warning", f"{value}; no active port on {', '.join(sorted(there - active))}", fix
    return "ok", value, None


def _has_gid(gids: tuple[int, ...], index: str | None) -> bool:
    return bool(gids) if index is None else index in map(str, gids)


def find_peer_memory(
    node: str, platform: str, starting: Collection[Process], *, modules: Path = _MODULES
) -> list[Finding]:
    """Judge whether adapters can reach device memory; nothing where no connector wants RDMA, and on a CPU."""
    if platform != "cuda" or all(process.rdma_devices is None for process in starting):
        return []
    need = NodeNeed(node, "rdma", "adapters that reach device memory: nvidia_peermem, or dmabuf", unverified=True)
    if any((modules / name).is_dir() for name in _PEER_MODULES):
        return [need.found("ok", "nvidia_peermem is loaded")]
    value = "nvidia_peermem is not loaded: device memory is registered by dmabuf, or not at all"
    fix = "modprobe nvidia_peermem on the host, or a kernel >= 5.12 with NVIDIA's open modules; --fabric tries it"
    return [need.found("warning", value, fix)]
