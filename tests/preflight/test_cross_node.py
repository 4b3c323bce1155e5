"""Which ports other nodes must reach, read from plans."""

from __future__ import annotations

import json

import pytest

from pdserve.plan.node import Node
from pdserve.preflight.reachability import CrossNodePort, cross_node_ports, side_channels
from tests.plan import kit


def addresses(targets: tuple[CrossNodePort, ...]) -> set[tuple[str, str, int, str]]:
    return {(port.source, port.address, port.port, port.purpose) for port in targets}


def test_one_node_reaches_nothing_but_itself() -> None:
    assert cross_node_ports(kit.plan(kit.recipe(kit.with_lmcache()))) == ()


def test_mooncake_on_two_nodes() -> None:
    plan = kit.plan(kit.recipe(kit.with_lmcache()), *kit.hosts(0, 0))
    ports = plan.process("prefill-0").ports, plan.process("decode-0").ports
    first = int(plan.process("decode-0").env.set["MC_MIN_RPC_PORT"])
    assert addresses(cross_node_ports(plan)) == {
        ("host1", "192.0.2.1", ports[0]["bootstrap"], "bootstrap of prefill-0"),
        ("host0", "192.0.2.2", ports[1]["http"], "http of decode-0"),
        ("host0", "192.0.2.2", first, "transfer of decode-0"),
    }


def test_no_port_of_lmcache_and_none_on_loopback() -> None:
    plan = kit.plan(kit.recipe(kit.with_lmcache(), {"prefill": {"instances": 3}}), *kit.hosts(0, 0))
    lmcache = {port for process in plan.processes if process.role == "lmcache" for port in process.ports.values()}
    assert not lmcache & {port.port for port in cross_node_ports(plan)}
    loopback = kit.plan(kit.recipe(), Node(name="a"), Node(name="b"))
    assert cross_node_ports(loopback) == ()


def test_the_proxy_asks_prefill_too() -> None:
    roles = {"prefill": {"instances": 2}, "decode": {"instances": 1}}
    plan = kit.plan(kit.recipe(roles), *kit.hosts(0, 0, 0))
    assert ("host0", "192.0.2.2", plan.process("prefill-1").ports["http"], "http of prefill-1") in addresses(
        cross_node_ports(plan)
    )
    bootstrap = plan.process("prefill-1").ports["bootstrap"]
    sources = {port.source for port in cross_node_ports(plan) if port.port == bootstrap and port.node == "host1"}
    assert sources == {"host0", "host2"}, "the proxy's node and decode's"


def test_nixl() -> None:
    connector = {"prefill": {"connector": kit.NIXL}, "decode": {"connector": kit.NIXL}}
    plan = kit.plan(kit.recipe(connector), *kit.hosts(0, 0))
    assert addresses(cross_node_ports(plan)) == {
        ("host1", "192.0.2.1", plan.process("prefill-0").ports["nixl"], "nixl of prefill-0"),
        ("host0", "192.0.2.2", plan.process("decode-0").ports["http"], "http of decode-0"),
    }


def test_kv_events_are_read_by_the_proxy() -> None:
    routing = {"proxy": {"routing": {"prefill": {"kind": "kv_events"}}}}
    plan = kit.plan(kit.recipe(routing, {"prefill": {"instances": 2}}), *kit.hosts(0, 0, 0))
    ports = {(port.source, port.node, port.purpose) for port in cross_node_ports(plan) if "kv_events" in port.purpose}
    assert ports == {
        ("host0", "host1", "kv_events of prefill-1"),
        ("host0", "host1", "kv_events-1 of prefill-1"),
    }


def test_an_instance_over_two_nodes() -> None:
    spread = {"prefill": {"parallel": {"tp": 4, "nodes": 2}}, "decode": {"parallel": {"tp": 2}}}
    plan = kit.plan(kit.recipe(kit.on_gpus(), spread), *kit.hosts(2, 2, 2))
    ports = [port for port in cross_node_ports(plan) if "dp_master" in port.purpose]
    assert [(port.source, port.node, port.purpose) for port in ports] == [("host1", "host0", "dp_master of prefill-0")]
    transfer = {(port.source, port.node) for port in cross_node_ports(plan) if "transfer" in port.purpose}
    assert transfer == {("host0", "host2"), ("host1", "host2")}, "followers hold a part of the KV"


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


def test_side_channels_on_one_node() -> None:
    assert side_channels(kit.plan(kit.recipe()), "prefill-0", json.dumps(QUERY)) == ()


@pytest.mark.parametrize(
    "answer", ["", "[]", "null", '{"0": {}}', '{"0": {"worker_addr": {"0": {"0": "nowhere"}}}}', '{"0": 1}']
)
def test_another_answer_is_an_error(answer: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        side_channels(kit.plan(kit.recipe(), *kit.hosts(0, 0)), "prefill-0", answer)
