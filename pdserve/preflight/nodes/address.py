"""The address of each node at which the others reach it: pure, from the nodes' facts."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from pdserve.errors import PreflightError, RecipeError
from pdserve.preflight.facts import NodeFacts
from pdserve.preflight.finding import ALL_NODES, Finding
from pdserve.preflight.interfaces import Interface, is_loopback
from pdserve.preflight.nodes.together import together


class NetworkSettings(Protocol):
    """The network of a recipe or a cluster file. Exactly one of the two."""

    @property
    def interface(self) -> str | None: ...

    @property
    def cidr(self) -> str | None: ...


class Chosen(NamedTuple):
    """A node's address, and how it came to it."""

    address: str
    interface: str | None
    """None: the address is on none of the node's interfaces, so far as they are known."""
    prefix: int | None
    why: str

    def __str__(self) -> str:
        on = "" if self.interface is None else f" ({self.interface}/{self.prefix})"
        return f"{self.address}{on}: {self.why}"


class Asked(NamedTuple):
    """One node whose address is to be chosen."""

    node: str
    configured: str | None
    """Its address in the cluster file."""
    key: str
    """Where the cluster file describes it: `hosts.1`."""
    others: tuple[str, ...]
    """What its facts have routes for: names or addresses of the other nodes."""


def choose_all(
    asked: Sequence[Asked],
    facts: Mapping[str, NodeFacts],
    network: NetworkSettings | None,
    locate: Callable[[str], str | None] = lambda _: None,
) -> dict[str, Chosen]:
    """The address of each node, as `choose` does it. Raises one PreflightError with every node that has none. `locate`:
    the line of the cluster file where a key stands.

    An address of the cluster file that is not the node's own comes first: it also misleads those that look for a route
    to it, and they would be blamed.
    """
    if len(asked) == 1 and network is None and asked[0].configured is None:
        return {asked[0].node: Chosen("127.0.0.1", None, None, "the only node")}
    _check_own(asked, facts, locate)
    chosen, errors = {}, []
    for entry in asked:
        try:
            chosen[entry.node] = choose(
                entry.node, facts[entry.node], network=network, configured=entry.configured, others=entry.others
            )
        except PreflightError as error:
            errors.append(error)
    if errors:
        what = f"{len(errors)} of {len(asked)} nodes have no address at which the others could reach them"
        raise together(errors, what, todo=_NAME_A_NETWORK if network is not None else errors[0].todo)
    return chosen


_HOSTS = "hosts"
"""The section of the cluster file that has the addresses."""


def _check_own(asked: Sequence[Asked], facts: Mapping[str, NodeFacts], locate: Callable[[str], str | None]) -> None:
    errors = []
    for entry in asked:
        there = facts[entry.node].interfaces
        address = entry.configured
        # Loopback has more addresses than it shows, and without any interface nothing is known.
        if address is None or is_loopback(address) or not there or address in {each.address for each in there}:
            continue
        owners = [node for node, its in facts.items() if address in {each.address for each in its.interfaces}]
        errors.append(
            PreflightError(
                f"{entry.node} does not have the address {address}" + (f", {owners[0]} has it" if owners else ""),
                where=f"{entry.key}.address",
                cause=f"there: {_shown(there)}",
                todo="write one that it has, or leave `address` out: then `network` decides, or the route to the "
                "other nodes",
            )
        )
    if len(errors) > 1:
        # Only the key of one error becomes a line where it is shown: these go into its evidence.
        for error in errors:
            line = locate(error.where or "")
            error.where = f"{line}: {error.where}" if line else error.where
    if errors:
        raised = together(errors, f"{len(errors)} hosts do not have their address", todo=errors[0].todo)
        raised.where = raised.where or _HOSTS
        raise raised


def choose(
    node: str, facts: NodeFacts, *, network: NetworkSettings | None, configured: str | None, others: Sequence[str]
) -> Chosen:
    """The interface or subnet of `network`; else the `configured` address of the cluster file; else the address from
    which the node reaches the `others` (targets that its facts have routes for).

    With a network a configured address only chooses among those that are in it. Raises PreflightError naming the node,
    what was asked and what is there.
    """
    if network is not None and (network.interface is not None or network.cidr is not None):
        return _in_network(node, facts, network, configured)
    if configured is not None:
        return _known(facts, configured, "by the cluster file")
    return _routed(node, facts, others)


def _in_network(node: str, facts: NodeFacts, network: NetworkSettings, configured: str | None) -> Chosen:
    if network.interface is not None:
        asked, where = f"interface {network.interface}", "network.interface"
        there = [interface for interface in facts.interfaces if interface.name.partition(":")[0] == network.interface]
    else:
        asked, where = f"an address in {network.cidr}", "network.cidr"
        subnet = _subnet(network.cidr or "")
        there = [interface for interface in facts.interfaces if ipaddress.IPv4Address(interface.address) in subnet]
    if configured is not None:
        asked += f" that is {configured}"
        there = [interface for interface in there if interface.address == configured]
    if len(there) == 1:
        return _chosen(there[0], f"the network of the deployment is {asked}")
    what = f"{node} has no {asked.removeprefix('an ')}"
    if there:
        what = f"{node} has {len(there)} addresses for {asked}: {_shown(there)}"
    raise PreflightError(
        what,
        where=where,
        cause=f"there: {_shown(facts.interfaces)}",
        todo=f"{_NAME_A_NETWORK}, or leave the node out (exclude_nodes: [{node}])",
    )


_NAME_A_NETWORK = "name an interface or a subnet in which every node has exactly one address"


def _subnet(text: str) -> ipaddress.IPv4Network:
    try:
        return ipaddress.IPv4Network(text, strict=False)
    except ValueError as error:
        raise RecipeError(f"{text!r} is no IPv4 subnet: {error}", where="network.cidr") from None


def _routed(node: str, facts: NodeFacts, others: Sequence[str]) -> Chosen:
    sources = {other: source for other in others if (source := facts.routes.get(other)) is not None}
    outside = {other: source for other, source in sources.items() if not is_loopback(source)}
    addresses = sorted(set(outside.values()))
    if len(addresses) == 1:
        first = next(iter(outside))
        return _known(facts, addresses[0], f"from there it reaches {first}" + (" and more" if len(outside) > 1 else ""))
    if addresses:
        what = f"{node} reaches the other nodes from different addresses: {_pairs(outside)}"
    else:
        unknown = [other for other in others if other not in sources]
        what = f"{node} has no route to {', '.join(unknown or others) or 'any other node'}"
        if sources:
            what += f" but by loopback ({_pairs(sources)})"
    raise PreflightError(
        what,
        cause=f"there: {_shown(facts.interfaces)}",
        todo="choose one: network: {interface: NAME} or {cidr: A.B.C.D/N}, or `address` of each host in the cluster "
        "file; if a name is not known there, /etc/hosts or DNS of that node lacks it",
    )


def _known(facts: NodeFacts, address: str, why: str) -> Chosen:
    for interface in facts.interfaces:
        if interface.address == address:
            return _chosen(interface, why)
    return Chosen(address, None, None, why)


def _chosen(interface: Interface, why: str) -> Chosen:
    return Chosen(interface.address, interface.name, interface.prefix, why)


def _shown(there: Sequence[Interface]) -> str:
    return ", ".join(str(interface) for interface in there) or "no interface with an IPv4 address"


def _pairs(sources: Mapping[str, str]) -> str:
    return ", ".join(f"{source} towards {other}" for other, source in sources.items())


def find_addresses(chosen: Mapping[str, Chosen], *, same_subnet: bool) -> list[Finding]:
    """How the addresses of all nodes (by name) fit together. `same_subnet`: a network was asked for by name, so that a
    node in another subnet is a mistake; otherwise it may be routed, and is a warning.

    One node alone may have any address. An address that is twice there is one of a bridge that every host has
    (docker0), or one host under two names.
    """
    if len(chosen) < 2:
        return []
    findings = []
    by_address: dict[str, list[str]] = {}
    for node, choice in chosen.items():
        by_address.setdefault(choice.address, []).append(node)
        if is_loopback(choice.address):
            findings.append(
                _finding(node, "failed", f"{choice.address} is loopback", "an address that other nodes reach", _FIX)
            )
    for address, nodes in by_address.items():
        if len(nodes) > 1 and not is_loopback(address):
            value = f"{address} is the address of {', '.join(nodes)}"
            findings.append(_finding(ALL_NODES, "failed", value, "an address of its own for each node", _FIX))
    subnets: dict[str, list[str]] = {}
    for node, choice in chosen.items():
        if choice.prefix is not None:
            subnet = ipaddress.IPv4Network((choice.address, choice.prefix), strict=False)
            subnets.setdefault(str(subnet), []).append(node)
    if len(subnets) > 1:
        value = "; ".join(f"{subnet}: {', '.join(nodes)}" for subnet, nodes in subnets.items())
        status = "failed" if same_subnet else "warning"
        findings.append(_finding(ALL_NODES, status, value, "all nodes in one subnet", _FIX))
    if not findings:
        value = ", ".join(f"{node} {choice.address}" for node, choice in chosen.items())
        findings.append(_finding(ALL_NODES, "ok", value, "an address of its own for each node, in one subnet"))
    return findings


_FIX = "choose the network: network: {interface: NAME} or {cidr: A.B.C.D/N}; or leave a node out with exclude_nodes"


def _finding(node: str, status: str, value: str, need: str, fix: str | None = None) -> Finding:
    return Finding.model_validate(
        {"node": node, "check": "address", "status": status, "value": value, "need": need, "fix": fix}
    )
