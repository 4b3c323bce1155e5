"""Both ends of a transfer on their nodes: the programs, the ports behind them, and what became of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdserve.plan.frozen import Frozen
from pdserve.preflight import rdma
from pdserve.preflight.fabric import transfer_program
from pdserve.preflight.fabric.paths import End
from pdserve.preflight.fabric.paths import Path as FabricPath
from pdserve.preflight.interfaces import interfaces, mtu, route_source, speed
from pdserve.preflight.nodes.cross_node import CrossNodePort
from pdserve.preflight.nodes.reachability import Tried, try_all
from pdserve.system import procfs
from pdserve.system.interpreter import source_command
from pdserve.system.process import output_of, spawn_piped

_START_SECONDS = 45.0
"""Until an end has imported the engine and registered its memory: cold files of a distant disk, on a busy node."""
_CONNECT_SECONDS = 2.0
_SEND_SECONDS = 7
"""Of the writes alone. With the connections before them less than ten: the engine's own limit of a transfer is 30 s."""
_MOST_LINES = 6


class EndFailure(Frozen):
    """What one end could not do."""

    step: str
    error: str
    memlock: int | None = None
    """The soft limit there in bytes; None: it was not learnt, or there is none."""
    output: tuple[str, ...] = ()
    """The last lines of what the engine printed."""


class Link(Frozen):
    """The interface that has an address."""

    name: str
    mtu: int | None
    gbps: float | None = None
    """10^9 bits a second that it should give: of the interface, or of the RDMA port. None: not known."""


class WaitingEnd(Frozen):
    """An end that waits for the other one to write to its memory, or to read it."""

    session_port: int
    """Of Mooncake; 0: NIXL has none."""
    pointer: int
    kind: str = "DRAM"
    """NIXL's word for the memory."""
    metadata: str = ""
    """Of NIXL's agent, in base64."""
    ports: tuple[int, ...]
    """All on which it listens at its address."""
    link: Link | None


class Sent(Frozen):
    """What became of one transfer."""

    unreachable: tuple[tuple[int, str, str], ...] = ()
    """Ports that could not be connected to: port, problem, cause."""
    failure: EndFailure | None = None
    connect_seconds: float = 0.0
    timings: tuple[tuple[int, float], ...] = ()
    """Bytes and seconds of each write, the largest last."""
    link: Link | None = None
    leaves_by: str | None = None
    """The address that packets to the target really come from."""


class Waiting:
    """The waiting end on this node. Its owner must `close` it; it also leaves when its owner dies."""

    def __init__(self, end: End, python: str | None, *, is_read: bool) -> None:
        # A file without a name: nobody is left to remove one when this process is killed.
        self._output = os.memfd_create("pdserve-fabric")
        self._log = Path(f"/proc/self/fd/{self._output}")
        try:
            self._popen = spawn_piped(
                source_command(python or sys.executable, transfer_program), env=_environment(end), stderr=self._log
            )
        except OSError:
            os.close(self._output)
            raise
        self._end, self._is_read = end, is_read

    def begin(self) -> WaitingEnd | EndFailure:
        """Waits until it has its memory."""
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: its answer is missing
            os.write(self._popen.stdin.fileno(), _order(self._end, reads=self._is_read))
        answer = _parsed(self._line(), _tail(self._log))
        if isinstance(answer, EndFailure):
            return answer
        address = self._end.address
        ports = tuple(sorted(procfs.listening_ports([self._popen.pid], at=address)))
        return WaitingEnd.model_validate({**answer, "ports": ports, "link": _link(self._end)})

    def _line(self) -> str:
        """Its answer; empty when it ended or was too late."""
        assert self._popen.stdout is not None
        deadline, read = time.monotonic() + _START_SECONDS, b""
        output = self._popen.stdout.fileno()
        while not read.endswith(b"\n") and select.select([output], [], [], max(0.0, deadline - time.monotonic()))[0]:
            part = os.read(output, 1 << 16)
            if not part:
                break
            read += part
        return read.decode(errors="replace")

    def close(self) -> None:
        """Ends it and forgets what it printed."""
        with self._popen:
            self._popen.kill()
        os.close(self._output)


def send(path: FabricPath, to: WaitingEnd, python: str | None) -> Sent:
    """One transfer of this node with another. First the ports that the other end listens on: where a firewall drops
    packets, the engine would wait for half a minute."""
    here, there = path.caller, path.waiting
    link, leaves_by = _link(here), route_source(there.address)
    tried = asyncio.run(_connect(path, to))
    unreachable = tuple(
        (attempt.target.port, attempt.problem, attempt.cause or "unknown") for attempt in tried if attempt.problem
    )
    if unreachable:
        return Sent(unreachable=unreachable, link=link, leaves_by=leaves_by)
    peer = {"address": there.address, **to.model_dump(include={"session_port", "pointer", "kind", "metadata"})}
    order = _order(here, {"peer": peer, "seconds": _SEND_SECONDS}, reads=path.reads).decode()
    limit = _START_SECONDS + _SEND_SECONDS
    program = source_command(python or sys.executable, transfer_program)
    done = output_of(program, timeout=limit, cwd=Path("/"), stdin=order, environ=_environment(here))
    output = tuple(done.err.splitlines()[-_MOST_LINES:])
    answer: dict[str, Any] | EndFailure
    if done.code is None:
        answer = EndFailure(step="start", error=done.err)
    elif done.code == -signal.SIGALRM:
        answer = EndFailure(step="transfer", error=f"not done within {_SEND_SECONDS} s", output=output)
    else:
        answer = _parsed(done.out, output)
    connect = max((attempt.seconds for attempt in tried), default=0.0)
    if isinstance(answer, EndFailure):
        return Sent(failure=answer, connect_seconds=connect, link=link, leaves_by=leaves_by)
    return Sent(connect_seconds=connect, timings=answer["timings"], link=link, leaves_by=leaves_by)


async def _connect(path: FabricPath, to: WaitingEnd) -> list[Tried]:
    targets = [
        CrossNodePort(
            source=path.caller.node,
            node=path.waiting.node,
            address=path.waiting.address,
            port=port,
            purpose=f"transfer of {path.waiting.process}",
        )
        for port in to.ports
    ]
    # Each by itself: `try_all` gives a node up after its first port.
    tries = (try_all([target], deadline=_CONNECT_SECONDS, greeted=False) for target in targets)
    return [attempt for [attempt] in await asyncio.gather(*tries)]


def _environment(end: End) -> dict[str, str]:
    return {**os.environ, **end.environment}


def _order(end: End, more: Mapping[str, Any] | None = None, *, reads: bool) -> bytes:
    known = end.model_dump(include={"engine", "platform", "on_device", "protocol", "devices"})
    return json.dumps({"host": end.address, "reads": reads, **known, **(more or {})}).encode() + b"\n"


def _parsed(line: str, output: tuple[str, ...]) -> dict[str, Any] | EndFailure:
    """The answer of a program; what is none is a failure of it."""
    try:
        answer = json.loads(line)
    except ValueError:
        return EndFailure(step="start", error="its program ended, or was not ready in time", output=output)
    if "error" in answer:
        memlock = answer["memlock"] if answer["memlock"] >= 0 else None
        return EndFailure(step=answer["step"], error=answer["error"], memlock=memlock, output=output)
    parsed: dict[str, Any] = answer
    return parsed


def _link(end: End) -> Link | None:
    for interface in interfaces():
        if interface.address == end.address:
            return Link(name=interface.name, mtu=mtu(interface.name), gbps=_link_gbps(end, interface.name))
    return None


def _link_gbps(end: End, interface: str) -> float | None:
    """UCX may take an RDMA device where there is one."""
    port = None if end.protocol == "tcp" else rdma.fastest([name for name in end.devices.split(",") if name])
    if end.protocol == "rdma":
        return port
    return speed(interface) if port is None else None


def _tail(log: Path) -> tuple[str, ...]:
    return tuple(log.read_text(errors="replace").splitlines()[-_MOST_LINES:])
