"""Which ports other nodes must reach, by the plan; nodes that listen and connect, over loopback and a cut network."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Collection
from typing import Any

import pytest

from pdserve.plan.model import Plan
from pdserve.plan.node import Node
from pdserve.preflight.finding import Finding
from pdserve.preflight.reachability import (
    DEADLINE_SECONDS,
    CrossNodePort,
    ListenOutcome,
    connect,
    cross_node_ports,
    listen,
    side_channels,
)
from tests.launch.deployment import free_ports
from tests.plan import kit
from tests.preflight.kit import in_namespace


def reached(*changes: dict[str, Any], nodes: int = 2, gpus: int = 0) -> tuple[Plan, set[tuple[str, str, int, str]]]:
    """The plan, and (who connects, address, port, purpose) of each port."""
    plan = kit.plan(kit.recipe(*changes), *kit.hosts(*[gpus] * nodes))
    return plan, {(port.source, port.address, port.port, port.purpose) for port in cross_node_ports(plan)}


def test_ports_of_mooncake_and_nixl_on_two_nodes() -> None:
    plan, ports = reached(kit.with_lmcache())
    prefill, decode = plan.process("prefill-0"), plan.process("decode-0")
    assert ports == {
        ("host1", "192.0.2.1", prefill.ports["bootstrap"], "bootstrap of prefill-0"),
        ("host0", "192.0.2.2", decode.ports["http"], "http of decode-0"),
        ("host0", "192.0.2.2", int(decode.env.set["MC_MIN_RPC_PORT"]), "transfer of decode-0"),
    }
    plan, ports = reached({"prefill": {"connector": kit.NIXL}, "decode": {"connector": kit.NIXL}})
    assert ports == {
        ("host1", "192.0.2.1", plan.process("prefill-0").ports["nixl"], "nixl of prefill-0"),
        ("host0", "192.0.2.2", plan.process("decode-0").ports["http"], "http of decode-0"),
    }


def test_one_node_loopback_and_lmcache_are_reached_by_nobody() -> None:
    assert cross_node_ports(kit.plan(kit.recipe(kit.with_lmcache()))) == ()
    assert cross_node_ports(kit.plan(kit.recipe(), Node(name="a"), Node(name="b"))) == ()
    plan, ports = reached(kit.with_lmcache(), {"prefill": {"instances": 3}})
    lmcache = {port for process in plan.processes if process.role == "lmcache" for port in process.ports.values()}
    assert not lmcache & {port for _, _, port, _ in ports}


def test_the_proxy_asks_prefill_too_and_reads_its_kv_events() -> None:
    routing = {"proxy": {"routing": {"prefill": {"kind": "kv_events"}}}}
    plan, ports = reached(routing, {"prefill": {"instances": 2}}, nodes=3)
    own = plan.process("prefill-1").ports
    assert ("host0", "192.0.2.2", own["http"], "http of prefill-1") in ports
    asking = {source for source, address, port, _ in ports if (address, port) == ("192.0.2.2", own["bootstrap"])}
    assert asking == {"host0", "host2"}, "the proxy's node and decode's"
    events = {(source, purpose) for source, _, _, purpose in ports if "kv_events" in purpose}
    assert events == {("host0", "kv_events of prefill-1"), ("host0", "kv_events-1 of prefill-1")}


def test_an_instance_over_two_nodes() -> None:
    spread = {"prefill": {"parallel": {"tp": 4, "nodes": 2}}, "decode": {"parallel": {"tp": 2}}}
    _, ports = reached(kit.on_gpus(), spread, nodes=3, gpus=2)
    leader = [(source, address) for source, address, _, purpose in ports if purpose == "dp_master of prefill-0"]
    assert leader == [("host1", "192.0.2.1")]
    transfer = {(source, address) for source, address, _, purpose in ports if "transfer" in purpose}
    assert transfer == {("host0", "192.0.2.3"), ("host1", "192.0.2.3")}, "followers hold a part of the KV"


QUERY = {
    "0": {"engine_id": "e0", "worker_addr": {"0": {"0": "tcp://192.0.2.1:41001"}, "1": {"0": "tcp://192.0.2.1:41002"}}},
    "1": {"engine_id": "e1", "worker_addr": {"0": {"0": "tcp://192.0.2.1:41003"}}},
}
"""The shape of vLLM 0.32's EngineEntry: vllm/.../kv_connector/v1/mooncake/mooncake_utils.py."""


def test_side_channels_are_read_from_the_bootstrap_server() -> None:
    plan = kit.plan(kit.recipe(), *kit.hosts(0, 0))
    ports = side_channels(plan, "prefill-0", json.dumps(QUERY))
    assert [(port.source, port.node, port.address, port.port) for port in ports] == [
        ("host1", "host0", "192.0.2.1", port) for port in (41001, 41002, 41003)
    ]
    assert ports[1].purpose == "prefill-0 side channel of dp 0 tp 1 pp 0"
    assert side_channels(kit.plan(kit.recipe()), "prefill-0", json.dumps(QUERY)) == (), "on one node"


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
    assert b == ListenOutcome((("127.0.0.2", first), ("127.0.0.2", second)), ())
    assert c.bound == (("127.0.0.3", first),)
    assert [(finding.node, finding.check, finding.status) for finding in findings] == [("a", "reach", "ok")] * 2
    assert findings[0].need == "a connects to b (127.0.0.2) on 2 port(s)"


def test_ports_that_refuse_are_named_and_the_others_are_not() -> None:
    first, second = free_ports(2)
    targets = [target(first), target(second)]
    [finding] = connected(targets[:1])
    assert (finding.status, finding.value) == ("failed", f"b at 127.0.0.2, port {first}: refused")
    assert "http of decode-0" in finding.evidence[0]
    assert "nothing listens there" in finding.evidence[0]
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


def test_ports_are_free_for_the_engines_at_once() -> None:
    [port] = free_ports(1)
    targets = [target(port)]
    with listen("b", targets):
        assert connected(targets)[0].status == "ok"
        # One that is still connected when the listener ends.
        lingering = socket.create_connection(("127.0.0.2", port))
    with lingering, socket.socket() as engine:
        engine.bind(("127.0.0.2", port))


def test_a_port_that_cannot_be_listened_on() -> None:
    with socket.create_server(("127.0.0.2", 0)) as owner:
        port = owner.getsockname()[1]
        targets = [target(port), target(port, address="192.0.2.99", purpose="bootstrap of prefill-0")]
        with listen("b", targets) as listening:
            taken, foreign = listening.findings
    assert (listening.bound, listening.taken) == ((), (("127.0.0.2", port),))
    assert (taken.status, foreign.status) == ("warning", "failed")
    assert foreign.value.startswith(f"192.0.2.99:{port} (bootstrap of prefill-0) cannot be listened on")
    assert "the node does not have this address" in str(foreign.fix)


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
