"""How nodes fit together: the address of each, versions, clocks, names."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.errors import PreflightError
from pdserve.plan.model import Plan
from pdserve.preflight.agreement import (
    AddressQuery,
    ChosenAddress,
    NetworkSettings,
    Skew,
    choose,
    choose_all,
    clock_skew,
    compare,
    find_addresses,
    find_unnamed_network,
)
from pdserve.preflight.facts import NodeFacts
from pdserve.preflight.finding import Finding, summarize_warnings
from pdserve.preflight.links import Interface
from pdserve.recipe.sections import Network
from tests.plan import kit
from tests.preflight.kit import LOOPBACK, facts, interface
from tests.tables import each_row

THERE = facts(
    interfaces=(
        LOOPBACK,
        interface("eth0", "10.1.0.7", 24),
        interface("ib0", "10.2.0.7", 16),
        interface("ib0", "10.3.0.7", 16),
        interface("docker0", "172.17.0.1", 16, up=False),
    ),
    routes={"b": "10.1.0.7", "c": "10.1.0.7", "far": None, "self": "127.0.1.1", "fast": "10.2.0.7"},
)
ETH0, ETH1, IB0 = (Network(interface=name) for name in ("eth0", "eth1", "ib0"))


def chosen(
    network: NetworkSettings | None = None, configured: str | None = None, others: tuple[str, ...] = ("b", "c")
) -> ChosenAddress:
    return choose(AddressQuery("a", configured, "", others), THERE, network)


@each_row("network, configured, others, address, on", [
    (ETH0, None, (), "10.1.0.7", "eth0"),
    (Network(cidr="10.2.0.0/16"), None, (), "10.2.0.7", "ib0"),
    (Network(cidr="10.2.5.6/16"), None, (), "10.2.0.7", "ib0"),
    (IB0, "10.3.0.7", (), "10.3.0.7", "ib0"),  # the cluster file chooses within the network
    (None, "10.2.0.7", (), "10.2.0.7", "ib0"),
    (None, "node-a.example", (), "node-a.example", None),
    (None, None, ("b", "c"), "10.1.0.7", "eth0"),
    (None, None, ("b", "far"), "10.1.0.7", "eth0"),  # a name that one node does not know is not the end
    (None, None, ("self", "b"), "10.1.0.7", "eth0"),  # hosts that resolve themselves to loopback
])  # fmt: skip
def test_an_address_is_found_by_network_cluster_file_or_route(
    network: Network | None, configured: str | None, others: tuple[str, ...], address: str, on: str | None
) -> None:
    found = chosen(network, configured, others)
    assert (found.address, found.interface) == (address, on)


@each_row("network, configured, message, where", [
    (ETH1, None, "a has no interface eth1", "network.interface"),
    (ETH0, "10.3.0.7", "a has no interface eth0 that is 10.3.0.7", "network.interface"),
    (IB0, None, "a has 2 addresses for interface ib0: ib0 10.2.0.7/16, ib0 10.3", "network.interface"),
    (Network(cidr="10.9.0.0/16"), None, "a has no address in 10.9.0.0/16", "network.cidr"),
    (Network(cidr="10.0.0.0/8"), None, "a has 3 addresses for an address in 10.0.0.0/8", "network.cidr"),
])  # fmt: skip
def test_errors_name_the_node_what_was_asked_and_what_is_there(
    network: Network, configured: str | None, message: str, where: str
) -> None:
    with pytest.raises(PreflightError) as raised:
        chosen(network, configured)
    assert message in raised.value.what
    assert raised.value.where == where
    assert "docker0 172.17.0.1/16 (down)" in str(raised.value.cause)


@each_row("others, message", [
    (("b", "fast"), "different addresses: 10.1.0.7 towards b, 10.2.0.7 towards fast"),
    (("far",), "a has no route to far"),
    (("far", "self"), "a has no route to far but by loopback (127.0.1.1 towards self)"),
    ((), "a has no route to any other node"),
])  # fmt: skip
def test_a_route_that_does_not_decide(others: tuple[str, ...], message: str) -> None:
    with pytest.raises(PreflightError) as raised:
        chosen(others=others)
    assert message in raised.value.what
    assert "network" in str(raised.value.todo)


def asked(node: str, configured: str | None = None, others: tuple[str, ...] = ()) -> AddressQuery:
    return AddressQuery(node, configured, f"hosts.{ord(node) - ord('a')}", others)


HOSTS = {
    "a": facts(interfaces=(LOOPBACK, interface("eth0", "10.1.0.1", 24)), routes={"10.9.9.9": "192.0.2.1"}),
    "b": facts(interfaces=(LOOPBACK, interface("eth0", "10.1.0.2", 24)), routes={"a": "10.1.0.2"}),
    "c": facts(interfaces=(LOOPBACK, interface("eth0", "10.1.0.3", 24)), routes={"a": "10.1.0.3"}),
}


def refused(*nodes: AddressQuery, network: NetworkSettings | None = None) -> PreflightError:
    lines = {"hosts.0.address": "cluster.yaml:3", "hosts.1.address": "cluster.yaml:5"}
    with pytest.raises(PreflightError) as raised:
        choose_all(nodes, HOSTS, network, lines.get)
    return raised.value


def test_each_node_gets_its_own_and_the_only_one_needs_none() -> None:
    addresses = choose_all([asked("b", others=("a",)), asked("c", "10.1.0.3")], HOSTS, None)
    assert {node: address.address for node, address in addresses.items()} == {"b": "10.1.0.2", "c": "10.1.0.3"}
    assert choose_all([asked("a")], HOSTS, None)["a"].address == "127.0.0.1"
    assert choose_all([asked("a", "127.0.0.9")], HOSTS, None)["a"].address == "127.0.0.9"
    assert choose_all([asked("a")], HOSTS, ETH0)["a"].address == "10.1.0.1"


@each_row("network", [None, ETH0, Network(cidr="10.1.0.0/24")])
def test_the_host_whose_address_is_not_its_own_is_blamed_and_not_who_looks_for_it(network: Network | None) -> None:
    error = refused(asked("a", others=("10.9.9.9",)), asked("b", "10.9.9.9", ("a",)), network=network)
    assert (error.what, error.where) == ("b does not have the address 10.9.9.9", "hosts.1.address")
    assert error.cause == "there: lo 127.0.0.1/8, eth0 10.1.0.2/24"
    assert "leave `address` out" in str(error.todo)


def test_all_hosts_with_wrong_addresses_are_reported_at_once_with_their_lines_and_their_owners() -> None:
    error = refused(asked("a", "10.1.0.2"), asked("b", "10.1.0.1"), asked("c", "10.1.0.3"))
    assert (error.what, error.where) == ("2 hosts do not have their address", "hosts")
    assert error.evidence == (
        "cluster.yaml:3: hosts.0.address: a does not have the address 10.1.0.2, b has it",
        "  there: lo 127.0.0.1/8, eth0 10.1.0.1/24",
        "cluster.yaml:5: hosts.1.address: b does not have the address 10.1.0.1, a has it",
        "  there: lo 127.0.0.1/8, eth0 10.1.0.2/24",
    )


def test_nodes_without_an_address_are_reported_once_with_every_way_to_one() -> None:
    error = refused(*map(asked, HOSTS), network=Network(cidr="10.8.0.0/16"))
    what = "3 of 3 nodes have no address at which the others could reach them"
    assert (error.what, error.where) == (what, "network.cidr")
    assert error.evidence[:2] == ("a has no address in 10.8.0.0/16", "  there: lo 127.0.0.1/8, eth0 10.1.0.1/24")
    assert "name an interface or a subnet" in str(error.todo)
    routeless = refused(asked("a", others=("b",)), asked("b", others=("c",)))
    assert routeless.what.startswith("2 of 2 nodes have no address")
    assert "/etc/hosts or DNS" in str(routeless.todo)


def at(address: str, prefix: int | None = 24) -> ChosenAddress:
    return ChosenAddress(address, "eth0", prefix, "")


@each_row("addresses, same_subnet, expected", [
    ([at("10.1.0.1"), at("10.1.0.2")], True, [("all nodes", "ok", "a 10.1.0.1, b 10.1.0.2")]),
    ([at("127.0.0.1", 8)], True, []),
    ([at("127.0.1.1", 8)] * 2, False, [(node, "failed", "127.0.1.1 is loopback") for node in "ab"]),
    ([at("172.17.0.1")] * 2, False, [("all nodes", "failed", "172.17.0.1 is the address of a, b")]),
    ([at("10.1.0.1"), at("10.2.0.1")], True, [("all nodes", "failed", "10.1.0.0/24: a; 10.2.0.0/24: b")]),
    ([at("10.1.0.1"), at("10.2.0.1")], False, [("all nodes", "warning", "10.1.0.0/24: a; 10.2.0.0/24: b")]),
])  # fmt: skip
def test_addresses_must_fit(addresses: list[ChosenAddress], same_subnet: bool, expected: list[tuple[str, ...]]) -> None:
    found = find_addresses(dict(zip("ab", addresses, strict=False)), same_subnet=same_subnet)
    assert [(finding.node, finding.status, finding.value) for finding in found] == expected


def node(number: int, *more: Interface) -> NodeFacts:
    return facts(interfaces=(LOOPBACK, interface("eth0", f"10.1.0.{number}", 24), *more))


def rail(number: int, *, up: bool = True) -> Interface:
    return interface("rdma0", f"192.168.7.{number}", 24, up=up)


def unnamed(*there: NodeFacts, named: bool = False) -> list[Finding]:
    every = {f"node{i}": its for i, its in enumerate(there, 1)}
    addresses = {name: ChosenAddress(f"10.1.0.{i}", "eth0", 24, "by the route") for i, name in enumerate(every, 1)}
    return find_unnamed_network(addresses, every, named=named)


def test_several_networks_are_named_with_what_to_write() -> None:
    [finding] = unnamed(node(1, rail(1)), node(2, rail(2)))
    assert (finding.status, finding.check, finding.node) == ("warning", "network", "all nodes")
    assert "node1: eth0 10.1.0.1/24 (in use), rdma0 192.168.7.1/24; node2: eth0 10.1.0.2/24 (in use)" in finding.value
    assert "network: {interface: eth0 or rdma0}" in str(finding.fix)
    [finding] = unnamed(node(1, rail(1)), node(2))
    assert ("rdma0" in finding.value, "node2" in finding.value) == (True, False)
    assert "{interface: eth0}" in str(finding.fix), "what only some nodes have is shown and not proposed"
    [finding] = unnamed(*(node(number, rail(number)) for number in range(1, 10)))
    assert ("node4" in finding.value, "node5" in finding.value) == (True, False)
    assert "and 5 more nodes" in finding.value


INSIDE = (
    interface("docker0", "172.17.0.1", 16),
    interface("br-4711", "172.18.0.1", 16),
    interface("eth1", "169.254.3.1", 16),
)
BRIDGE = interface("lan0", "172.20.0.1", 16)


@each_row("there, named", [
    ([node(1, rail(1)), node(2, rail(2))], True),
    ([node(1), node(2)], False),
    ([node(1, rail(1))], False),
    ([node(1, *INSIDE, rail(1, up=False)), node(2)], False),
    ([node(1, BRIDGE), node(2, BRIDGE)], False),  # an address that every node has is none of a network
    ([node(1, interface("eth0:1", "10.1.0.77", 24)), node(2)], False),  # two addresses in one network
])  # fmt: skip
def test_one_network_is_no_choice_and_whoever_has_named_one_knows(there: list[NodeFacts], named: bool) -> None:
    assert unnamed(*there, named=named) == []


NODES = kit.hosts(0, 0, 0)
"""host0 has prefill and the proxy, host1 decode, host2 nothing."""


def plan(*changes: dict[str, Any]) -> Plan:
    return kit.plan(kit.recipe(kit.with_lmcache(), *changes), *NODES)


def nodes_with(**changes: dict[str, Any]) -> dict[str, NodeFacts]:
    return {node.name: facts(hostname=node.name, **changes.get(node.name, {})) for node in NODES}


def versions(**changes: str | None) -> dict[str, Any]:
    return {"versions": kit.VERSIONS.model_copy(update=changes)}


def bad(facts_of: dict[str, NodeFacts], check: str = "versions", wanted: Plan | None = None) -> list[tuple[str, ...]]:
    found = [finding for finding in compare(wanted or plan(), facts_of) if finding.check == check]
    return [(finding.node, finding.status, finding.value) for finding in found if finding.status != "ok"]


def test_nodes_that_agree() -> None:
    findings = compare(plan(), nodes_with(), {node.name: Skew(0.01, 0.1) for node in NODES})
    assert {finding.status for finding in findings} == {"ok"}
    assert {finding.check for finding in findings} == {"versions", "clock", "hostname"}
    assert "vllm 0.32.0" in {finding.value for finding in findings}
    alone = compare(plan(), {"host0": facts()}, {"host0": Skew(99, 0)})
    assert {(finding.node, finding.check) for finding in alone} == {("host0", "versions")}


def test_a_pdserve_that_is_not_the_launchers() -> None:
    """In an image, say, while all nodes have the same."""
    there = {"host0": facts(pdserve_version="0.0.1", pdserve_digest="0123")}
    assert not [one for one in compare(plan(), there, ours="0.0.1 (0123)") if one.status == "failed"]
    [failed] = [one for one in compare(plan(), there, ours="0.0.2 (4567)") if one.status == "failed"]
    assert (failed.node, failed.value) == ("host0", "pdserve 0.0.1 (0123) there, 0.0.2 (4567) here")


PROBLEM = {"versions": kit.VERSIONS.model_validate({}), "versions_problem": "/opt/x cannot be used"}


@each_row("changes, expected", [
    ({"host1": versions(vllm="0.31.0")}, ("all nodes", "failed", "vllm 0.31.0 on host1; 0.32.0 on host0, host2")),
    # Where nothing uses it, it is only strange.
    ({"host2": versions(vllm="0.31.0")}, ("all nodes", "warning", "vllm 0.31.0 on host2; 0.32.0 on host0, host1")),
    ({"host1": versions(mooncake=None), "host2": versions(vllm=None)},
     ("host1", "failed", "mooncake is not installed")),
    ({"host1": versions(lmcache=None)}, None),
    ({"host0": versions(lmcache=None)}, ("host0", "failed", "lmcache is not installed")),
    ({"host1": PROBLEM}, ("host1", "failed", "/opt/x cannot be used")),
])  # fmt: skip
def test_versions_that_differ_or_are_lacking(changes: dict[str, Any], expected: tuple[str, ...] | None) -> None:
    assert bad(nodes_with(**changes)) == ([] if expected is None else [expected])


def test_of_a_version_outside_of_what_is_known_one_up_warns_once() -> None:
    there = nodes_with(**{node.name: versions(vllm="0.99.0") for node in NODES})
    wanted = kit.plan(kit.recipe(), *NODES, versions=there["host0"].versions)
    warnings = [*wanted.warnings, *summarize_warnings(compare(wanted, there))]
    assert len([text for text in warnings if "0.99.0" in text]) == 1


def test_a_command_of_the_recipe_needs_no_package() -> None:
    nothing = {node.name: versions(vllm=None, lmcache=None, mooncake=None, nixl=None) for node in NODES}
    own = plan({"engine": {"command": ["serve"]}, "lmcache": {"command": ["cache"]}})
    assert bad(nodes_with(**nothing), wanted=own) == []


@each_row("change", [{"pdserve_version": "1.1"}, {"pdserve_digest": "fedcba9876543210"}])
def test_another_pdserve(change: dict[str, str]) -> None:
    [(node, status, value)] = bad(nodes_with(host2=change))
    assert (node, status) == ("all nodes", "failed")
    assert value.endswith("on host2; 1.0 (0123456789abcdef) on host0, host1")


@each_row("skew, status", [
    (Skew(1.5, 0), None), (Skew(3.0, 0), "warning"), (Skew(-3.0, 0), "warning"),
    (Skew(3.0, 1.5), None), (Skew(60.0, 1.0), "failed"), (Skew(-3600.0, 1.0), "failed"),
])  # fmt: skip
def test_clocks_are_compared_with_each_other(skew: Skew, status: str | None) -> None:
    skews = {
        "host0": Skew(500.1, 0.05),
        "host1": Skew(500 + skew.seconds, skew.uncertainty),
        "host2": Skew(499.9, 0.05),
    }
    findings = [finding for finding in compare(plan(), nodes_with(), skews) if finding.check == "clock"]
    expected = [("all nodes", "ok")] if status is None else [("host1", status)]
    assert [(finding.node, finding.status) for finding in findings] == expected


def test_skew_as_ntp_measures_it() -> None:
    # Asked at 100 by our clock; half a second there, 4 s of gathering, half a second back; its clock is 7 s ahead.
    skew = clock_skew(facts(unix_time=100 + 0.5 + 4 + 7, gather_seconds=4.0), sent=100.0, received=105.0)
    assert skew == pytest.approx((7.0, 0.5))


def test_equal_hostnames() -> None:
    same = {node.name: facts(hostname="localhost") for node in NODES}
    assert bad(same, "hostname") == [("all nodes", "warning", "host0, host1, host2 all call themselves localhost")]
