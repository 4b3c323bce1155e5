"""Each node's address: by interface, by subnet, by the cluster file, else by the route to the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest

from pdserve.errors import PreflightError, RecipeError
from pdserve.preflight.agreement import Asked, Chosen, NetworkSettings, choose, choose_all, find_addresses
from pdserve.preflight.facts import NodeFacts
from pdserve.recipe.sections import Network
from tests.preflight.kit import LOOPBACK, facts, interface


class Wanted(NamedTuple):
    interface: str | None = None
    cidr: str | None = None


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


def chosen(
    network: NetworkSettings | None = None,
    configured: str | None = None,
    others: tuple[str, ...] = ("b", "c"),
    facts: NodeFacts = THERE,
) -> Chosen:
    return choose(Asked("a", configured, "", others), facts, network)


def test_the_recipe_s_own_section_is_a_network() -> None:
    assert chosen(Network(interface="eth0")).address == "10.1.0.7"


def test_by_interface() -> None:
    address = chosen(Wanted(interface="eth0"))
    assert (address.address, address.interface, address.prefix) == ("10.1.0.7", "eth0", 24)
    assert str(address) == "10.1.0.7 (eth0/24): the network of the deployment is interface eth0"


def test_by_subnet() -> None:
    assert chosen(Wanted(cidr="10.2.0.0/16")).address == "10.2.0.7"
    assert chosen(Wanted(cidr="10.2.5.6/16")).address == "10.2.0.7", "host bits do not matter"


def test_by_the_cluster_file() -> None:
    assert chosen(configured="10.2.0.7").interface == "ib0"
    assert chosen(configured="node-a.example").address == "node-a.example"


def test_by_route() -> None:
    address = chosen()
    assert (address.address, address.interface, address.why) == ("10.1.0.7", "eth0", "from there it reaches b and more")
    assert chosen(others=("b", "far")).address == "10.1.0.7", "a name that one node does not know is not the end"
    assert chosen(others=("self", "b")).address == "10.1.0.7", "hosts that resolve themselves to loopback"


def test_a_network_wins_over_the_cluster_file_which_chooses_within_it() -> None:
    assert chosen(Wanted(interface="ib0"), configured="10.3.0.7").address == "10.3.0.7"
    with pytest.raises(PreflightError, match=r"a has no interface eth0 that is 10\.3\.0\.7"):
        chosen(Wanted(interface="eth0"), configured="10.3.0.7")


@pytest.mark.parametrize(
    ("network", "message", "where"),
    [
        (Wanted(interface="eth1"), "a has no interface eth1", "network.interface"),
        (
            Wanted(interface="ib0"),
            "a has 2 addresses for interface ib0: ib0 10.2.0.7/16, ib0 10.3",
            "network.interface",
        ),
        (Wanted(cidr="10.9.0.0/16"), "a has no address in 10.9.0.0/16", "network.cidr"),
        (Wanted(cidr="10.0.0.0/8"), "a has 3 addresses for an address in 10.0.0.0/8", "network.cidr"),
    ],
)
def test_errors_name_the_node_what_was_asked_and_what_is_there(
    network: NetworkSettings, message: str, where: str
) -> None:
    with pytest.raises(PreflightError) as raised:
        chosen(network)
    assert message in raised.value.what
    assert raised.value.where == where
    assert "docker0 172.17.0.1/16 (down)" in str(raised.value.cause)


def test_no_subnet_at_all() -> None:
    with pytest.raises(RecipeError, match=r"'10\.1' is no IPv4 subnet"):
        chosen(Wanted(cidr="10.1"))


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (("b", "fast"), "different addresses: 10.1.0.7 towards b, 10.2.0.7 towards fast"),
        (("far",), "a has no route to far"),
        (("far", "self"), "a has no route to far but by loopback (127.0.1.1 towards self)"),
        ((), "a has no route to any other node"),
    ],
)
def test_a_route_that_does_not_decide(others: tuple[str, ...], message: str) -> None:
    with pytest.raises(PreflightError) as raised:
        chosen(others=others)
    assert message in raised.value.what
    assert "network" in str(raised.value.todo)


def asked(node: str, configured: str | None = None, others: tuple[str, ...] = ()) -> Asked:
    return Asked(node, configured, f"hosts.{ord(node) - ord('a')}", others)


NODES = {
    "a": facts(interfaces=(LOOPBACK, interface("eth0", "10.1.0.1", 24)), routes={"10.9.9.9": "192.0.2.1"}),
    "b": facts(interfaces=(LOOPBACK, interface("eth0", "10.1.0.2", 24)), routes={"a": "10.1.0.2"}),
    "c": facts(interfaces=(LOOPBACK, interface("eth0", "10.1.0.3", 24)), routes={"a": "10.1.0.3"}),
}


def refused(nodes: Sequence[Asked], network: NetworkSettings | None = None) -> PreflightError:
    with pytest.raises(PreflightError) as raised:
        choose_all(nodes, NODES, network)
    return raised.value


def test_each_node_gets_its_own() -> None:
    addresses = choose_all([asked("b", others=("a",)), asked("c", "10.1.0.3")], NODES, None)
    assert {node: address.address for node, address in addresses.items()} == {"b": "10.1.0.2", "c": "10.1.0.3"}


def test_the_only_node_needs_none() -> None:
    assert choose_all([asked("a")], NODES, None)["a"].address == "127.0.0.1"
    assert choose_all([asked("a", "127.0.0.1")], NODES, None)["a"].address == "127.0.0.1"
    assert choose_all([asked("a", "127.0.0.9")], NODES, None)["a"].address == "127.0.0.9"
    assert choose_all([asked("a")], NODES, Wanted(interface="eth0"))["a"].address == "10.1.0.1"


@pytest.mark.parametrize("network", [None, Wanted(interface="eth0"), Wanted(cidr="10.1.0.0/24")])
def test_the_host_whose_address_is_not_its_own_is_blamed_and_not_who_looks_for_it(
    network: NetworkSettings | None,
) -> None:
    error = refused([asked("a", others=("10.9.9.9",)), asked("b", "10.9.9.9", ("a",))], network)
    assert (error.what, error.where) == ("b does not have the address 10.9.9.9", "hosts.1.address")
    assert error.cause == "there: lo 127.0.0.1/8, eth0 10.1.0.2/24"
    assert "leave `address` out" in str(error.todo)


def test_the_address_of_another_host_is_reported_with_its_owner() -> None:
    error = refused([asked("a", "10.1.0.1"), asked("b", "10.1.0.3"), asked("c")])
    assert error.what == "b does not have the address 10.1.0.3, c has it"


def test_all_hosts_with_wrong_addresses_are_reported_at_once() -> None:
    error = refused([asked("a", "10.1.0.2"), asked("b", "10.1.0.1"), asked("c", "10.1.0.3")])
    assert error.what == "2 hosts do not have their address"
    assert error.evidence == (
        "hosts.0.address: a does not have the address 10.1.0.2, b has it",
        "  there: lo 127.0.0.1/8, eth0 10.1.0.1/24",
        "hosts.1.address: b does not have the address 10.1.0.1, a has it",
        "  there: lo 127.0.0.1/8, eth0 10.1.0.2/24",
    )


def test_each_of_them_with_its_line_of_the_cluster_file() -> None:
    lines = {"hosts.0.address": "cluster.yaml:3", "hosts.1.address": "cluster.yaml:5"}
    with pytest.raises(PreflightError) as raised:
        choose_all([asked("a", "10.1.0.2"), asked("b", "10.1.0.1")], NODES, None, lines.get)
    assert raised.value.where == "hosts", "becomes a line of the cluster file where it is shown"
    assert [line.partition(" does")[0] for line in raised.value.evidence[::2]] == [
        "cluster.yaml:3: hosts.0.address: a",
        "cluster.yaml:5: hosts.1.address: b",
    ]


def test_a_network_without_any_node_is_reported_once_with_all_nodes() -> None:
    error = refused([asked(node) for node in NODES], Wanted(cidr="10.8.0.0/16"))
    assert (error.what, error.where) == (
        "3 of 3 nodes have no address at which the others could reach them",
        "network.cidr",
    )
    assert error.evidence[:2] == ("a has no address in 10.8.0.0/16", "  there: lo 127.0.0.1/8, eth0 10.1.0.1/24")
    assert "name an interface or a subnet" in str(error.todo)


def test_several_nodes_without_a_route_are_an_error_with_every_way_to_an_address() -> None:
    error = refused([asked("a", others=("b",)), asked("b", others=("c",))])
    assert error.what == "2 of 2 nodes have no address at which the others could reach them"
    with pytest.raises(PreflightError) as single_error:
        choose(asked("a", others=("b",)), NODES["a"], None)
    assert error.todo == single_error.value.todo
    assert "/etc/hosts or DNS" in str(error.todo)


def at(address: str, prefix: int | None = 24) -> Chosen:
    return Chosen(address, "eth0", prefix, "")


def test_addresses_that_fit() -> None:
    [finding] = find_addresses({"a": at("10.1.0.1"), "b": at("10.1.0.2")}, same_subnet=True)
    assert finding.status == "ok"


def test_one_node_may_be_at_loopback() -> None:
    assert find_addresses({"a": at("127.0.0.1", 8)}, same_subnet=True) == []


def test_two_nodes_may_not() -> None:
    findings = find_addresses({"a": at("127.0.1.1", 8), "b": at("127.0.1.1", 8)}, same_subnet=False)
    assert [(address.node, address.status) for address in findings] == [("a", "failed"), ("b", "failed")]


def test_an_address_that_two_nodes_have() -> None:
    [finding] = find_addresses({"a": at("172.17.0.1"), "b": at("172.17.0.1")}, same_subnet=False)
    assert (finding.status, finding.value) == ("failed", "172.17.0.1 is the address of a, b")


@pytest.mark.parametrize(("same_subnet", "status"), [(True, "failed"), (False, "warning")])
def test_addresses_of_two_subnets(same_subnet: bool, status: str) -> None:
    [finding] = find_addresses({"a": at("10.1.0.1"), "b": at("10.2.0.1")}, same_subnet=same_subnet)
    assert (finding.status, finding.value) == (status, "10.1.0.0/24: a; 10.2.0.0/24: b")
