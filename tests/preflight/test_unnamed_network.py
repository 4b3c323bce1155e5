"""The hint where nodes have several networks and the recipe names none."""

from __future__ import annotations

from pdserve.preflight.agreement import Chosen, find_unnamed_network
from pdserve.preflight.facts import NodeFacts
from pdserve.preflight.finding import Finding
from pdserve.preflight.links import Interface
from tests.preflight.kit import LOOPBACK, facts, interface

DOCKER = interface("docker0", "172.17.0.1", 16)


def node(number: int, *more: Interface) -> NodeFacts:
    return facts(interfaces=(LOOPBACK, interface("eth0", f"10.1.0.{number}", 24), *more))


def look(*there: NodeFacts, named: bool = False) -> list[Finding]:
    every = {f"node{i}": its for i, its in enumerate(there, 1)}
    chosen = {name: Chosen(f"10.1.0.{i}", "eth0", 24, "by the route") for i, name in enumerate(every, 1)}
    return find_unnamed_network(chosen, every, named=named)


def fabric(number: int) -> Interface:
    return interface("rdma0", f"192.168.7.{number}", 24)


def test_several_networks_are_named_with_what_to_write() -> None:
    [finding] = look(node(1, fabric(1)), node(2, fabric(2)))
    assert (finding.status, finding.check, finding.node) == ("warning", "network", "all nodes")
    assert "node1: eth0 10.1.0.1/24 (in use), rdma0 192.168.7.1/24; node2: eth0 10.1.0.2/24 (in use)" in finding.value
    assert "network: {interface: eth0 or rdma0}" in str(finding.fix)


def test_a_network_that_only_some_nodes_have_is_shown_but_not_proposed() -> None:
    [finding] = look(node(1, fabric(1)), node(2))
    assert "rdma0" in finding.value
    assert "node2" not in finding.value
    assert "{interface: eth0}" in str(finding.fix)


def test_many_nodes_are_shown_in_part() -> None:
    [finding] = look(*(node(number, fabric(number)) for number in range(1, 10)))
    assert "node4" in finding.value
    assert "node5" not in finding.value
    assert "and 5 more nodes" in finding.value


def test_whoever_has_named_a_network_knows() -> None:
    assert look(node(1, fabric(1)), node(2, fabric(2)), named=True) == []


def test_one_network_or_one_node_is_no_choice() -> None:
    assert look(node(1), node(2)) == []
    assert look(node(1, fabric(1))) == []


def test_what_leads_to_no_other_node_does_not_count() -> None:
    inside = (DOCKER, interface("br-4711", "172.18.0.1", 16), interface("eth1", "169.254.3.1", 16))
    down = interface("rdma0", "192.168.7.1", 24, up=False)
    assert look(node(1, *inside, down), node(2, *inside)) == []
    bridge = interface("lan0", "172.20.0.1", 16)
    assert look(node(1, bridge), node(2, bridge)) == [], "an address that every node has is none of a network"
    alias = interface("eth0:1", "10.1.0.77", 24)
    assert look(node(1, alias), node(2)) == [], "two addresses in one network"
