"""The nodes reach each other or not: which ports of a plan other nodes connect to, and whether they can.

One node listens on them, the others connect and hear who it is. Loopback ports (LMCache, the proxy's admin) are not
among them.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple
from urllib.parse import urlsplit

from pdserve.plan.model import Frozen, Plan
from pdserve.plan.process import Process
from pdserve.preflight.finding import Finding, NodeNeed, processes_on
from pdserve.preflight.links import is_loopback
from pdserve.time_limit import time_limit

DEADLINE_SECONDS = 3.0
"""For one connection. A node whose link is down shows after 3 s as "no route" (its ARP), on the first try."""
_AT_ONCE = 256
"""Connections of one node: far from the 1024 open files that a process may have to live with."""
_MOST_EVIDENCE = 8
_GREETING = "pdserve preflight "
_LINE_LIMIT = 512
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class CrossNodePort(Frozen):
    """A port on one node that another node must reach."""

    source: str
    """The node that connects."""
    node: str
    """The node that listens."""
    address: str
    port: int
    purpose: str
    """For people: `bootstrap of prefill-0`."""
    greets: bool = True
    """Whether the listener there sends the name of its node; a stranger's would never come."""


def cross_node_ports(plan: Plan) -> tuple[CrossNodePort, ...]:
    """Return the pinned ports that other nodes connect to, in plan order, each once.

    Who connects is in the plan's `reached_by`; of a range the first port stands for all. The followers of an instance
    that spans nodes connect to their leader.
    """
    return tuple(dict.fromkeys(target for target in _all_ports(plan) if target.source != target.node))


def side_channels(plan: Plan, prefill: str, answer: str | bytes) -> tuple[CrossNodePort, ...]:
    """Return the side channels that Mooncake's workers of a prefill have bound at random, for the nodes with a decode.

    `answer`: of its bootstrap server to /query (vLLM 0.26-0.33): {"<dp rank>": {"engine_id": ..., "worker_addr":
    {"<tp>": {"<pp>": "tcp://ip:port"}}}}. Raises ValueError when it is something else.
    """
    process = plan.process(prefill)
    targets = [
        CrossNodePort(
            source=source, node=process.node, address=address, port=port, purpose=f"{prefill} side channel of {who}"
        )
        for who, address, port in _workers(answer)
        for source in _nodes_of(plan, ("decode",))
    ]
    return tuple(dict.fromkeys(target for target in targets if target.source != target.node))


def _workers(answer: str | bytes) -> Iterator[tuple[str, str, int]]:
    try:
        ranks = json.loads(answer)
        for dp, entry in ranks.items():
            for tp, stages in entry["worker_addr"].items():
                for pp, url in stages.items():
                    where = urlsplit(url)
                    if where.hostname is None or where.port is None:
                        raise ValueError(f"{url!r} is no address")
                    yield f"dp {dp} tp {tp} pp {pp}", where.hostname, where.port
    except (AttributeError, TypeError, KeyError) as error:
        raise ValueError(f"not the answer of a bootstrap server: {error!r}") from None


def _all_ports(plan: Plan) -> Iterator[CrossNodePort]:
    for process in plan.processes:
        ranges = {purpose: taken.first for purpose, taken in process.port_ranges.items()}
        for purpose, port in {**process.ports, **ranges}.items():
            kind = purpose.partition("-")[0]  # the second one of a purpose has a number
            if roles := process.reached_by.get(kind):
                yield from _ports_to(plan, process, purpose, port, _nodes_of(plan, roles))
            elif kind == "dp_master":
                followers = plan.instance_of(process.name)[1:]
                sources = dict.fromkeys(follower.node for follower in followers)
                yield from _ports_to(plan, process, purpose, port, sources)


def _ports_to(plan: Plan, process: Process, purpose: str, port: int, sources: Iterable[str]) -> Iterator[CrossNodePort]:
    address = plan.node(process.node).address
    if is_loopback(address):
        return
    for source in sources:
        yield CrossNodePort(
            source=source, node=process.node, address=address, port=port, purpose=f"{purpose} of {process.name}"
        )


def _nodes_of(plan: Plan, roles: Collection[str]) -> list[str]:
    return [node.name for node in plan.nodes if any(process.role in roles for process in processes_on(plan, node.name))]


class ListenOutcome(NamedTuple):
    """Holds the outcome of `listen`."""

    bound: tuple[tuple[str, int], ...]
    findings: tuple[Finding, ...]
    """The findings of the ports that could not be bound."""
    taken: tuple[tuple[str, int], ...] = ()
    """Another program listens there already."""


@contextmanager
def listen(node: str, targets: Collection[CrossNodePort]) -> Iterator[ListenOutcome]:
    """Listen on the ports of `targets` that are on this `node`, and send its name on every connection.

    Connections are reset when it ends: a socket that waits for the last segment of an earlier connection would keep an
    engine from binding its port.
    """
    wanted = dict.fromkeys((target.address, target.port) for target in targets if target.node == node)
    sockets: dict[tuple[str, int], socket.socket] = {}
    findings, taken = [], []
    for address, port in wanted:
        try:
            sockets[address, port] = socket.create_server((address, port), backlog=_AT_ONCE)
        except OSError as error:
            purposes = {target.purpose for target in targets if (target.address, target.port) == (address, port)}
            findings.append(_not_bound(node, f"{address}:{port} ({', '.join(sorted(purposes))})", error))
            if error.errno == errno.EADDRINUSE:
                taken.append((address, port))
    waking, woken = socket.socketpair()
    thread = threading.Thread(target=_greet, args=(node, list(sockets.values()), woken), name="preflight-listen")
    thread.start()
    try:
        yield ListenOutcome(tuple(sockets), tuple(findings), tuple(taken))
    finally:
        waking.close()
        thread.join()
        woken.close()


def _not_bound(node: str, what: str, error: OSError) -> Finding:
    fix = {
        errno.EADDRNOTAVAIL: "the node does not have this address: correct network, or address in the cluster file",
        errno.EADDRINUSE: "stop the owner (see the finding about ports), or move ours: --set ports.KIND=PORT",
        errno.EACCES: "use ports above 1023",
    }.get(error.errno or 0)
    # What is in use may be our own deployment's, which connects all the same: the ports' finding judges that.
    return NodeNeed(node, "reach", "to listen there").found(
        "warning" if error.errno == errno.EADDRINUSE else "failed",
        f"{what} cannot be listened on: {os.strerror(error.errno or 0)}",
        fix,
    )


def _greet(node: str, servers: Sequence[socket.socket], woken: socket.socket) -> None:
    """Greet until the other end of `woken` is closed. A connection is kept until its client has left."""
    with selectors.DefaultSelector() as selector:
        selector.register(woken, selectors.EVENT_READ)
        for server in servers:
            server.setblocking(False)
            selector.register(server, selectors.EVENT_READ)
        clients: set[socket.socket] = set()
        listening = set(servers)
        while True:
            for key, _ in selector.select():
                if key.fileobj is woken:
                    for sock in (*listening, *clients):
                        sock.close()
                    return
                assert isinstance(key.fileobj, socket.socket)
                if key.fileobj in listening:
                    if (client := _accept(key.fileobj, node)) is not None:
                        clients.add(client)
                        selector.register(client, selectors.EVENT_READ)
                else:
                    selector.unregister(key.fileobj)
                    clients.discard(key.fileobj)
                    key.fileobj.close()


def _accept(server: socket.socket, node: str) -> socket.socket | None:
    """Return None where the client has left already."""
    try:
        client, _ = server.accept()
    except OSError:
        return None
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    client.setblocking(False)
    try:
        client.sendall(f"{_GREETING}{node}\n".encode())
    except OSError:
        client.close()
        return None
    return client


class ConnectionOutcome(NamedTuple):
    """The outcome of one connection."""

    target: CrossNodePort
    problem: str | None
    """None: it was accepted, by the right node, if it sent its name."""
    cause: str | None = None
    seconds: float = 0.0


async def try_all(
    targets: Collection[CrossNodePort], *, deadline: float = DEADLINE_SECONDS, greeted: bool = True
) -> list[ConnectionOutcome]:
    """Connect to every target, many at once.

    `greeted`: a `listen` is at the other end, so who answers is compared; otherwise, and where the target does not
    greet, any listener is enough. A node whose first port gives no answer at all is not waited for on all its others.
    """
    gate = asyncio.Semaphore(_AT_ONCE)
    nodes: dict[tuple[str, str], list[CrossNodePort]] = {}
    for target in targets:
        nodes.setdefault((target.source, target.node), []).append(target)

    async def try_target(target: CrossNodePort) -> ConnectionOutcome:
        async with gate:
            return await _try(target, deadline, greeted and target.greets)

    async def node(ports: Sequence[CrossNodePort]) -> list[ConnectionOutcome]:
        first = await try_target(ports[0])
        if first.cause == _DROPPED:
            return [
                first,
                *(ConnectionOutcome(port, "not tried", "its first port gave no answer") for port in ports[1:]),
            ]
        return [first, *await asyncio.gather(*(try_target(port) for port in ports[1:]))]

    return [tried for some in await asyncio.gather(*(node(ports) for ports in nodes.values())) for tried in some]


async def _try(target: CrossNodePort, deadline: float, greeted: bool) -> ConnectionOutcome:
    began = time.monotonic()
    try:
        async with time_limit(deadline):
            reader, writer = await asyncio.open_connection(target.address, target.port, limit=_LINE_LIMIT)
    except TimeoutError:
        return ConnectionOutcome(target, f"no answer within {deadline:g} s", _DROPPED)
    except OSError as error:
        return ConnectionOutcome(target, *_CAUSES.get(error.errno or 0, (error.strerror or str(error), "unknown")))
    connected = time.monotonic() - began
    greeting = b""
    if greeted:
        # No greeting is no error: it may be our own deployment, while it is changed.
        with contextlib.suppress(TimeoutError, OSError, ValueError):
            async with time_limit(max(0.1, deadline - connected)):
                greeting = await reader.readline()
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    name = greeting.decode(errors="replace").strip()
    if name.startswith(_GREETING) and (who := name.removeprefix(_GREETING)) != target.node:
        return ConnectionOutcome(target, f"{who} answers instead", _OTHER, connected)
    return ConnectionOutcome(target, None, None, connected)


_DROPPED = "a firewall drops it, or the address is of a network that the other nodes are not on"
_REFUSED = "the node answers, and nothing listens there: its side was not ready, or a firewall refuses it"
_NO_ROUTE = "the node is off this network, its link is down, or a firewall rejects it"
_UNREACHABLE = "this node has no route into that network"
_OTHER = "the address belongs to several machines: that of a bridge (docker0), or a duplicate"
_FORBIDDEN = ("forbidden by this node's firewall", "an output rule of this node")
_CAUSES = {
    errno.ECONNREFUSED: ("refused", _REFUSED),
    errno.EHOSTUNREACH: ("no route to host", _NO_ROUTE),
    errno.ENETUNREACH: ("network unreachable", _UNREACHABLE),
    errno.ETIMEDOUT: ("timed out", _DROPPED),
    errno.EACCES: _FORBIDDEN,
    errno.EPERM: _FORBIDDEN,
}


async def connect(
    node: str, targets: Collection[CrossNodePort], *, deadline: float = DEADLINE_SECONDS, greeted: bool = True
) -> list[Finding]:
    """Try the targets whose source is this `node`: one finding for each node that it must reach."""
    mine = [target for target in targets if target.source == node]
    there: dict[str, list[ConnectionOutcome]] = {}
    for attempt in await try_all(mine, deadline=deadline, greeted=greeted):
        there.setdefault(attempt.target.node, []).append(attempt)
    return [_judge(node, other, tried) for other, tried in there.items()]


def _judge(source: str, node: str, tried: Sequence[ConnectionOutcome]) -> Finding:
    address = tried[0].target.address
    need = NodeNeed(source, "reach", f"{source} connects to {node} ({address}) on {len(tried)} port(s)")
    bad = [attempt for attempt in tried if attempt.problem is not None]
    if not bad:
        slowest = max(attempt.seconds for attempt in tried)
        return need.found("ok", f"reached in {slowest * 1000:.0f} ms")
    problems = ", ".join(dict.fromkeys(str(attempt.problem) for attempt in bad))
    shown = f"port {bad[0].target.port}" if len(bad) == 1 else f"{len(bad)} of {len(tried)} ports"
    ports = sorted({attempt.target.port for attempt in bad})
    listed = ", ".join(map(str, ports)) if len(ports) <= 6 else f"{ports[0]}-{ports[-1]}"
    if len(bad) == len(tried):
        fix = f"choose the network (network: {{interface: NAME}} or {{cidr: A.B.C.D/N}}), or open TCP {listed}"
    else:
        fix = f"open TCP {listed} on {node}: other ports of it are reached"
    evidence = [
        f"{attempt.target.address}:{attempt.target.port} ({attempt.target.purpose}): {attempt.problem}; {attempt.cause}"
        for attempt in bad[:_MOST_EVIDENCE]
    ]
    if len(bad) > _MOST_EVIDENCE:
        evidence.append(f"and {len(bad) - _MOST_EVIDENCE} more")
    return need.found("failed", f"{node} at {address}, {shown}: {problems}", fix, evidence)
