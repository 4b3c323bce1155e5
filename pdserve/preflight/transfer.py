"""A transfer of KV between two nodes as the plan has it, and its ends on their nodes: programs, ports, the outcome."""

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
from typing import Any, Literal

from pdserve.plan.frozen import Frozen
from pdserve.preflight import transfer_program
from pdserve.preflight.links import fastest_rdma, interfaces, mtu, route_source, speed
from pdserve.preflight.reachability import ConnectionOutcome, CrossNodePort, try_all
from pdserve.system import procfs
from pdserve.system.interpreter import source_command
from pdserve.system.process import output_of, spawn_piped

_START_SECONDS = 45.0
"""Until an end has imported the engine and registered its memory: cold files of a distant disk, on a busy node."""
_CONNECT_SECONDS = 2.0
_SEND_SECONDS = 7
"""Of the writes alone. With the connections before them less than ten: the engine's own limit of a transfer is 30 s."""
_MOST_LINES = 6


class End(Frozen):
    """One end of a transfer, as the engine that will be there has it."""

    node: str
    address: str
    connector: str
    """vLLM's class."""
    engine: Literal["mooncake", "nixl"]
    platform: Literal["cpu", "cuda", "rocm"]
    on_device: bool
    """KV is in the memory of a device; otherwise in host memory."""
    protocol: Literal["tcp", "rdma", "ucx"]
    """ucx: UCX chooses among what it finds."""
    devices: str
    """RDMA devices by the recipe, comma separated; empty: the engine chooses."""
    environment: dict[str, str]
    """What the plan sets for that engine. No secrets."""
    process: str
    """The engine whose ports are used: `decode-0`."""


class FabricPath(Frozen):
    """KV of `source` comes into the memory of `target`."""

    source: End
    target: End
    reads: bool = False
    """`target` reads it; otherwise `source` writes it."""
    rail: str | None = None
    """The RDMA device of both ends, where each is tried by itself."""

    @property
    def caller(self) -> End:
        """Return the end that does the transfer."""
        return self.target if self.reads else self.source

    @property
    def waiting(self) -> End:
        """Return the end whose memory is read or written, and whose ports are connected to."""
        return self.source if self.reads else self.target

    def __str__(self) -> str:
        return f"{self.source.node} -> {self.target.node}" + (f" by {self.rail}" if self.rail else "")


class EndFailure(Frozen):
    """A step that failed at one end."""

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
    """The port of Mooncake's session; 0: NIXL has none."""
    pointer: int
    kind: str = "DRAM"
    """NIXL's word for the memory."""
    metadata: str = ""
    """The metadata of NIXL's agent, in base64."""
    ports: tuple[int, ...]
    """All on which it listens at its address."""
    link: Link | None


class TransferOutcome(Frozen):
    """The outcome of one transfer."""

    unreachable: tuple[tuple[int, str, str], ...] = ()
    """Ports that could not be connected to: port, problem, cause."""
    failure: EndFailure | None = None
    connect_seconds: float = 0.0
    timings: tuple[tuple[int, float], ...] = ()
    """Bytes and seconds of each write, the largest last."""
    link: Link | None = None
    leaves_by: str | None = None
    """The address that packets to the target really come from."""

    @property
    def gbps(self) -> float:
        """Return the 10^9 bits a second of the largest write. 0 when nothing was written."""
        size, seconds = self.timings[-1] if self.timings else (0, 1.0)
        return size * 8 / seconds / 1e9


class OpenEnd:
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
        """Begin, and wait until the end has its memory."""
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: its answer is missing
            os.write(self._popen.stdin.fileno(), _order(self._end, reads=self._is_read))
        line = self._line()
        answer = _parsed(line, self._log.read_text(errors="replace"))
        if isinstance(answer, EndFailure):
            return answer
        ports = tuple(sorted(procfs.listening_ports([self._popen.pid], at=self._end.address)))
        return WaitingEnd.model_validate({**answer, "ports": ports, "link": _link(self._end)})

    def _line(self) -> str:
        """Read the program's answer; empty when it ended or was too late."""
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
        """End the program and forget what it printed."""
        with self._popen:
            self._popen.kill()
        os.close(self._output)


def send(path: FabricPath, to: WaitingEnd, python: str | None) -> TransferOutcome:
    """Make one transfer of this node with another.

    First the ports that the other end listens on are tried: where a firewall drops packets, the engine would wait for
    half a minute."""
    here, there = path.caller, path.waiting
    sent = TransferOutcome(link=_link(here), leaves_by=route_source(there.address))
    tried = asyncio.run(_connect(path, to))
    unreachable = tuple(
        (attempt.target.port, attempt.problem, attempt.cause or "unknown") for attempt in tried if attempt.problem
    )
    if unreachable:
        return sent.model_copy(update={"unreachable": unreachable})
    sent = sent.model_copy(update={"connect_seconds": max((attempt.seconds for attempt in tried), default=0.0)})
    peer = {"address": there.address, **to.model_dump(include={"session_port", "pointer", "kind", "metadata"})}
    order = _order(here, {"peer": peer, "seconds": _SEND_SECONDS}, reads=path.reads).decode()
    program = source_command(python or sys.executable, transfer_program)
    limit = _START_SECONDS + _SEND_SECONDS
    done = output_of(program, timeout=limit, cwd=Path("/"), stdin=order, environ=_environment(here))
    answer = _parsed(done.out, done.err)
    if done.code is None:
        answer = EndFailure(step="start", error=done.err)
    elif done.code == -signal.SIGALRM:
        answer = EndFailure(step="transfer", error=f"not done within {_SEND_SECONDS} s", output=_last_lines(done.err))
    if isinstance(answer, EndFailure):
        return sent.model_copy(update={"failure": answer})
    return TransferOutcome.model_validate({**sent.model_dump(), "timings": answer["timings"]})


async def _connect(path: FabricPath, to: WaitingEnd) -> list[ConnectionOutcome]:
    there = path.waiting
    targets = [
        CrossNodePort(
            source=path.caller.node,
            node=there.node,
            address=there.address,
            port=port,
            purpose=f"transfer of {there.process}",
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


def _parsed(line: str, printed: str) -> dict[str, Any] | EndFailure:
    """Return the answer of a program; what is none is a failure of it."""
    output = _last_lines(printed)
    try:
        answer: dict[str, Any] = json.loads(line)
    except ValueError:
        return EndFailure(step="start", error="its program ended, or was not ready in time", output=output)
    if "error" in answer:
        memlock = answer["memlock"] if answer["memlock"] >= 0 else None
        return EndFailure(step=answer["step"], error=answer["error"], memlock=memlock, output=output)
    return answer


def _last_lines(printed: str) -> tuple[str, ...]:
    return tuple(printed.splitlines()[-_MOST_LINES:])


def _link(end: End) -> Link | None:
    for interface in interfaces():
        if interface.address == end.address:
            return Link(name=interface.name, mtu=mtu(interface.name), gbps=_link_gbps(end, interface.name))
    return None


def _link_gbps(end: End, interface: str) -> float | None:
    """Return the rate of an end's link. UCX may take an RDMA device where there is one."""
    port = None if end.protocol == "tcp" else fastest_rdma([name for name in end.devices.split(",") if name])
    if end.protocol == "rdma":
        return port
    return speed(interface) if port is None else None
