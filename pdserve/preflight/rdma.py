"""RDMA devices, the state and the addresses of their links, and whether they reach device memory, from what the kernel
shows in /sys; no tool is needed."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from pdserve.plan.process import Process
from pdserve.preflight.finding import Finding, Status

_SYS = Path("/sys/class/infiniband")
_VERBS = Path("/dev/infiniband")
_ACTIVE = "ACTIVE"
_MODULES = Path("/sys/module")
_PEER_MODULES = ("nvidia_peermem", "nv_peer_mem")
_RATE = re.compile(r"([\d.]+) Gb/sec")
_GID_INDEX = "MC_GID_INDEX"
"""Mooncake's choice among the GIDs of a port."""


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
        return self.state.endswith(_ACTIVE)

    def __str__(self) -> str:
        return f"{self.device} port {self.number}: {self.state}, {self.rate}"


def ports(sys: Path = _SYS) -> list[RdmaPort]:
    """All ports, by device; empty without RDMA devices. OSError when the folder is there and cannot be read."""
    if not sys.is_dir():
        return []
    return [
        RdmaPort(device.name, port.name, _text(port / "state"), _text(port / "rate"), _gids(port / "gids"))
        for device in sorted(sys.iterdir())
        for port in sorted((device / "ports").iterdir())
    ]


def fastest(names: Collection[str], sys: Path = _SYS) -> float | None:
    """10^9 bits a second of the fastest active port of these devices, or of all where none is named; None: there is no
    such port, or its rate cannot be read. A transfer may use several."""
    devices = {name.partition(":")[0] for name in names}
    try:
        usable = [port for port in ports(sys) if port.active and (not devices or port.device in devices)]
    except OSError:
        return None
    rates = [float(rate[1]) for port in usable if (rate := _RATE.match(port.rate))]
    return max(rates, default=None)


def find_rdma(node: str, starting: Collection[Process], *, sys: Path = _SYS, verbs: Path = _VERBS) -> list[Finding]:
    """Nothing where no connector wants RDMA."""
    wanted = [names for process in starting if (names := process.rdma_devices) is not None]
    if not wanted:
        return []
    named = sorted({name for names in wanted for name in names})
    need = f"an active port on each of {', '.join(named)}" if named else "an RDMA device with an active port"
    try:
        rdma_ports = ports(sys)
    except OSError as error:
        return [_finding(node, "unknown", f"{sys} cannot be read: {error.strerror}", need)]
    index = next((number for process in starting if (number := process.env.set.get(_GID_INDEX))), None)
    status, value, fix = _judge(rdma_ports, named, verbs, index)
    return [_finding(node, status, value, need, fix, tuple(str(port) for port in rdma_ports))]


def _judge(
    rdma_ports: list[RdmaPort], named: list[str], verbs: Path, gid_index: str | None
) -> tuple[Status, str, str | None]:
    tcp = "or use the connector with protocol: tcp"
    if not rdma_ports:
        return "failed", "no RDMA device", f"load the driver of the adapters, {tcp}"
    if not any(verbs.glob("uverbs*")):
        fix = f"give the container the devices (docker: --device=/dev/infiniband), {tcp}"
        return "failed", f"devices that no process can open: no {verbs}/uverbs*", fix
    there = {port.device for port in rdma_ports}
    if absent := [name for name in named if name.partition(":")[0] not in there]:
        fix = f"correct device_name (of the connector or of mooncake_store): there are {', '.join(sorted(there))}"
        return "failed", f"no {', '.join(absent)}", fix
    active = {port.device for port in rdma_ports if port.active}
    wanted = {name.partition(":")[0] for name in named}
    if down := sorted(wanted - active) or (sorted(there) if not active else []):
        return (
            "failed",
            f"no active port on {', '.join(down)}",
            f"bring the link up (cable, switch, subnet manager), {tcp}",
        )
    usable = [port for port in rdma_ports if port.active and (not wanted or port.device in wanted)]
    if without := [port for port in usable if port.gids is not None and not _has_gid(port.gids, gid_index)]:
        which = "no GID" if gid_index is None else f"no GID {gid_index} ({_GID_INDEX})"
        value = f"{which} on {', '.join(f'{port.device} port {port.number}' for port in without)}"
        fix = "give the network interface of the device an address (RoCE), or start the subnet manager (InfiniBand)"
        if gid_index is not None:
            shown = sorted({gid for port in without for gid in port.gids or ()})
            fix = f"set {_GID_INDEX} to one that is there: {', '.join(map(str, shown)) or 'none is'}; or {fix}"
        return "failed", value, f"{fix}, {tcp}"
    value = ", ".join(str(port) for port in rdma_ports if port.active)
    if not named and there - active:
        fix = "name the good ones in device_name (of the connector or of mooncake_store): any may be taken otherwise"
        return "warning", f"{value}; no active port on {', '.join(sorted(there - active))}", fix
    return "ok", value, None


def find_peer_memory(
    node: str, platform: str, starting: Collection[Process], *, modules: Path = _MODULES
) -> list[Finding]:
    """Whether adapters can reach device memory; nothing where no connector wants RDMA, and on a CPU."""
    if platform != "cuda" or all(process.rdma_devices is None for process in starting):
        return []
    need = "adapters that reach device memory: nvidia_peermem, or dmabuf"
    if any((modules / name).is_dir() for name in _PEER_MODULES):
        return [_finding(node, "ok", "nvidia_peermem is loaded", need)]
    value = "nvidia_peermem is not loaded: device memory is registered by dmabuf, or not at all"
    fix = "modprobe nvidia_peermem on the host, or a kernel >= 5.12 with NVIDIA's open modules; --fabric tries it"
    return [_finding(node, "warning", value, need, fix)]


def _has_gid(gids: tuple[int, ...], index: str | None) -> bool:
    return bool(gids) if index is None else index in map(str, gids)


def _gids(folder: Path) -> tuple[int, ...] | None:
    """The entries that are no zeroes. Those that were never set cannot be read."""
    if not folder.is_dir():
        return None
    texts = {file.name: _text(file) for file in folder.iterdir() if file.name.isdecimal()}
    return tuple(sorted(int(name) for name, text in texts.items() if text[4:5] == ":" and set(text) - set("0:")))


def _finding(
    node: str, status: Status, value: str, need: str, fix: str | None = None, evidence: tuple[str, ...] = ()
) -> Finding:
    return Finding(
        node=node,
        check="rdma",
        status=status,
        value=value,
        need=need,
        fix=fix,
        evidence=evidence if status != "ok" else (),
        unverified_on_hardware=True,
    )


def _text(file: Path) -> str:
    """One that cannot be read counts as not active."""
    try:
        return file.read_text().strip()
    except OSError as error:
        return f"unreadable ({error.strerror})"
