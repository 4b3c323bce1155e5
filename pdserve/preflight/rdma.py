"""RDMA devices and the state of their links, from what the kernel shows in /sys; no tool is needed."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from pdserve.plan.model import Process
from pdserve.preflight.finding import Finding, Status

_SYS = Path("/sys/class/infiniband")
_VERBS = Path("/dev/infiniband")
_ACTIVE = "ACTIVE"


class RdmaPort(NamedTuple):
    """One port of an RDMA device."""

    device: str
    number: str
    state: str
    """As the kernel writes it: `4: ACTIVE`."""
    rate: str

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
        RdmaPort(device.name, port.name, _text(port / "state"), _text(port / "rate"))
        for device in sorted(sys.iterdir())
        for port in sorted((device / "ports").iterdir())
    ]


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
    status, value, fix = _judge(rdma_ports, named, verbs)
    return [_finding(node, status, value, need, fix, tuple(str(port) for port in rdma_ports))]


def _judge(rdma_ports: list[RdmaPort], named: list[str], verbs: Path) -> tuple[Status, str, str | None]:
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
    value = ", ".join(str(port) for port in rdma_ports if port.active)
    if not named and there - active:
        fix = "name the good ones in device_name (of the connector or of mooncake_store): any may be taken otherwise"
        return "warning", f"{value}; no active port on {', '.join(sorted(there - active))}", fix
    return "ok", value, None


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
