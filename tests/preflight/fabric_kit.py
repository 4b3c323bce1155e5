"""Ends and paths of the fabric check, and what became of a transfer."""

from __future__ import annotations

from pdserve.preflight.transfer import End, FabricPath, Link, Sent, WaitingEnd

MIB = 1 << 20


def end(node: str, *, protocol: str = "tcp", address: str = "127.0.0.1", on_device: bool = False) -> End:
    return End.model_validate(
        {
            "node": node,
            "address": address,
            "connector": "NixlConnector" if protocol == "ucx" else "MooncakeConnector",
            "engine": "nixl" if protocol == "ucx" else "mooncake",
            "platform": "rocm" if on_device else "cpu",
            "on_device": on_device,
            "protocol": protocol,
            "devices": "",
            "environment": {},
            "process": "decode-0",
        }
    )


def path(source: str = "a", target: str = "b", protocol: str = "tcp", *, on_device: bool = False) -> FabricPath:
    ends = (end(node, protocol=protocol, on_device=on_device) for node in (source, target))
    return FabricPath(source=next(ends), target=next(ends), reads=protocol == "ucx")


def receiver(mtu: int = 1500, gbps: float | None = None) -> WaitingEnd:
    link = Link(name="eth0", mtu=mtu, gbps=gbps)
    return WaitingEnd(session_port=15002, pointer=1, ports=(15002, 15075), link=link)


def wrote(size: int, seconds: float, **more: object) -> Sent:
    values = {"timings": ((4096, 0.001), (size, seconds)), "link": Link(name="eth0", mtu=1500), **more}
    return Sent.model_validate(values)
