"""Nodes that listen and nodes that connect: over loopback, and in a network of the test's own where it is cut."""

from __future__ import annotations

import asyncio
import resource
import socket
import threading
import time
from collections.abc import Collection

import pytest

from pdserve.preflight.finding import Finding
from pdserve.preflight.reachability import DEADLINE_SECONDS, CrossNodePort, Listening, connect, listen
from tests.launch.deployment import free_ports
from tests.preflight.kit import in_namespace


def target(
    port: int, *, node: str = "b", address: str = "127.0.0.2", purpose: str = "http of decode-0"
) -> CrossNodePort:
    return CrossNodePort(source="a", node=node, address=address, port=port, purpose=purpose)


def connected(
    targets: Collection[CrossNodePort], *, greeted: bool = True, deadline: float = DEADLINE_SECONDS
) -> list[Finding]:
    return asyncio.run(connect("a", targets, greeted=greeted, deadline=deadline))


def test_both_ends() -> None:
    first, second = free_ports(2)
    targets = [target(first), target(second), target(first, node="c", address="127.0.0.3")]
    with listen("b", targets) as b, listen("c", targets) as c:
        findings = connected(targets)
    assert b == Listening((("127.0.0.2", first), ("127.0.0.2", second)), ())
    assert c.bound == (("127.0.0.3", first),)
    assert [(finding.node, finding.check, finding.status) for finding in findings] == [("a", "reach", "ok")] * 2
    assert findings[0].need == "a connects to b (127.0.0.2) on 2 port(s)"


def test_a_node_tries_only_what_it_must_reach_itself() -> None:
    assert asyncio.run(connect("elsewhere", [target(1)])) == []


def test_refused() -> None:
    [port] = free_ports(1)
    [finding] = connected([target(port)])
    assert (finding.status, finding.value) == ("failed", f"b at 127.0.0.2, port {port}: refused")
    assert "http of decode-0" in finding.evidence[0]
    assert "nothing listens there" in finding.evidence[0]


def test_some_ports_only() -> None:
    first, second = free_ports(2)
    targets = [target(first), target(second)]
    with listen("b", targets[:1]):
        [finding] = connected(targets)
    assert finding.value == f"b at 127.0.0.2, port {second}: refused"
    assert finding.fix == f"open TCP {second} on b: other ports of it are reached"


def test_another_machine_at_the_same_address() -> None:
    [port] = free_ports(1)
    with listen("docker0-of-a", [target(port, node="docker0-of-a")]):
        [finding] = connected([target(port)])
    assert finding.status == "failed"
    assert "docker0-of-a answers instead" in finding.value


def test_after_the_start_it_is_enough_that_a_process_answers() -> None:
    with socket.create_server(("127.0.0.2", 0)) as engine:
        [finding] = connected([target(engine.getsockname()[1])], greeted=False)
    assert finding.status == "ok"


def test_a_port_of_another_process_is_reached_without_waiting_for_a_greeting() -> None:
    with socket.create_server(("127.0.0.2", 0)) as stranger:
        silent = target(stranger.getsockname()[1])
        with listen("b", [silent]) as there:
            assert there.taken == ((silent.address, silent.port),)
            began = time.monotonic()
            [finding] = connected([silent.model_copy(update={"greets": False})], deadline=60.0)
    assert finding.status == "ok"
    assert time.monotonic() - began < 30, "it would have been waited for as long as the deadline"


def test_a_port_that_cannot_be_bound_is_not_taken_for_one_in_use() -> None:
    [port] = free_ports(1)
    with listen("b", [target(port, address="203.0.113.200")]) as there:
        assert there.taken == ()
    assert [finding.status for finding in there.findings] == ["failed"]


def test_ports_are_free_for_the_engines_at_once() -> None:
    [port] = free_ports(1)
    targets = [target(port)]
    with listen("b", targets):
        assert connected(targets)[0].status == "ok"
        # One that is still connected when the listener ends.
        lingering = socket.create_connection(("127.0.0.2", port))
    with lingering, socket.socket() as engine:
        engine.bind(("127.0.0.2", port))


def test_nothing_is_left_of_a_listener() -> None:
    [port] = free_ports(1)
    before = threading.active_count()
    with pytest.raises(KeyError), listen("b", [target(port)]):
        raise KeyError
    assert threading.active_count() == before
    assert connected([target(port)])[0].status == "failed"


def test_a_port_that_cannot_be_listened_on() -> None:
    with socket.create_server(("127.0.0.2", 0)) as owner:
        port = owner.getsockname()[1]
        targets = [target(port), target(port, address="192.0.2.99", purpose="bootstrap of prefill-0")]
        with listen("b", targets) as listening:
            taken, foreign = listening.findings
    assert listening.bound == ()
    assert (taken.status, foreign.status) == ("warning", "failed")
    assert foreign.value.startswith(f"192.0.2.99:{port} (bootstrap of prefill-0) cannot be listened on")
    assert "the node does not have this address" in str(foreign.fix)


def test_many_connections_at_once() -> None:
    [port] = free_ports(1)
    targets = [target(port, purpose=f"port {n}") for n in range(600)]
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 600
    with listen("b", targets):
        [finding] = connected(targets, deadline=60)
    assert finding.status == "ok", finding.evidence


_CODE = """
import asyncio
from pdserve.preflight.reachability import CrossNodePort, connect
from pydantic import TypeAdapter
from pdserve.preflight.finding import Finding
targets = [CrossNodePort(source="a", node=a, address=a, port=p, purpose="x") for a in %r for p in %r]
findings = asyncio.run(connect("a", targets, deadline=3))
print(TypeAdapter(list[Finding]).dump_json(findings).decode())
"""


_CUT = (
    "link add net0 type veth peer name peer0",
    "link set net0 up",
    "link set peer0 up",
    "addr add 10.9.0.1/24 dev net0",
    "route add unreachable 10.9.0.66/32",
    "neigh add 10.9.0.2 lladdr 02:00:00:00:00:02 dev net0",
)


@pytest.mark.process
def test_the_errors_of_a_cut_network() -> None:
    """No route into the network, a host that is rejected, and one that swallows everything."""
    documents = in_namespace(_CODE % (["10.7.0.1", "10.9.0.66", "10.9.0.2"], [9]), network=_CUT)
    findings = [Finding.model_validate(document) for document in documents]
    assert [finding.value for finding in findings] == [
        "10.7.0.1 at 10.7.0.1, port 9: network unreachable",
        "10.9.0.66 at 10.9.0.66, port 9: no route to host",
        "10.9.0.2 at 10.9.0.2, port 9: no answer within 3 s",
    ]
    assert "no route into that network" in findings[0].evidence[0]
    assert "its link is down" in findings[1].evidence[0]
    assert "a firewall drops it" in findings[2].evidence[0]
    assert all("network" in str(finding.fix) for finding in findings)


@pytest.mark.process
def test_a_node_that_swallows_everything_is_not_waited_for_on_each_port() -> None:
    [document] = in_namespace(_CODE % (["10.9.0.2"], [*range(1, 501)]), network=_CUT)
    finding = Finding.model_validate(document)
    assert finding.value == "10.9.0.2 at 10.9.0.2, 500 of 500 ports: no answer within 3 s, not tried"
    assert finding.fix is not None
    assert finding.fix.endswith("open TCP 1-500")
    assert len(finding.evidence) == 9
    assert finding.evidence[-1] == "and 492 more"
