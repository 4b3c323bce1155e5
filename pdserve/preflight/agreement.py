"""The nodes fit together or not: the address of each at which the others reach it, versions, clocks, names.

Pure, over the facts of all of them.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from pdserve.errors import PreflightError, RecipeError
from pdserve.installed.versions import KNOWN, PACKAGES
from pdserve.plan.model import Plan
from pdserve.preflight.facts import NodeFacts
from pdserve.preflight.finding import ALL_NODES, Finding, NodeNeed, Status, join_errors, processes_on
from pdserve.preflight.links import Interface, is_loopback

CLOCK_WARNING_SECONDS = 2.0
"""Nothing that pdserve decides compares clocks of two nodes, but people do: beyond this, lines of two logs or events of
two nodes no longer stand in the order in which they happened."""
CLOCK_LIMIT_SECONDS = 30.0
"""No machine with a working time service is so far off, so that the next minutes make it worse: Slurm's munge and
Kerberos (NFS) refuse what is 300 s old, and certificates and tokens are refused as not valid yet."""
_NAME_A_NETWORK = "name an interface or a subnet in which every node has exactly one address"
_FIX_NETWORK = (
    "choose the network: network: {interface: NAME} or {cidr: A.B.C.D/N}; or leave a node out with exclude_nodes"
)
_VIRTUAL = ("docker", "br-", "virbr", "veth", "cni", "cali", "flannel", "cilium", "podman", "lxc", "lxd")
"""Bridges and ends of containers: no way to another node."""
_SHOWN_NODES = 4


class NetworkSettings(Protocol):
    """The network of a recipe or a cluster file. Exactly one of the two."""

    @property
    def interface(self) -> str | None: ...

    @property
    def cidr(self) -> str | None: ...


class ChosenAddress(NamedTuple):
    """A node's address, and how it came to it."""

    address: str
    interface: str | None
    """None: the address is on none of the node's interfaces, so far as they are known."""
    prefix: int | None
    why: str

    def __str__(self) -> str:
        on = "" if self.interface is None else f" ({self.interface}/{self.prefix})"
        return f"{self.address}{on}: {self.why}"


class AddressQuery(NamedTuple):
    """One node whose address is to be chosen."""

    node: str
    configured: str | None
    """Its address in the cluster file."""
    key: str
    """Where the cluster file describes it: `hosts.1`."""
    others: tuple[str, ...]
    """What its facts have routes for: names or addresses of the other nodes."""


def choose_all(
    asked: Sequence[AddressQuery],
    facts: Mapping[str, NodeFacts],
    network: NetworkSettings | None,
    locate: Callable[[str], str | None] = lambda _: None,
) -> dict[str, ChosenAddress]:
    """Choose the address of each node. Raises one PreflightError with every node that has none.

    `locate`: the line of the cluster file where a key stands. An address of the cluster file that is not the node's own
    comes first: it also misleads those that look for a route to it, and they would be blamed.
    """
    if len(asked) == 1 and network is None and asked[0].configured is None:
        return {asked[0].node: ChosenAddress("127.0.0.1", None, None, "the only node")}
    _check_own(asked, facts, locate)
    chosen, errors = {}, []
    for entry in asked:
        try:
            chosen[entry.node] = choose(entry, facts[entry.node], network)
        except PreflightError as error:
            errors.append(error)
    if errors:
        what = f"{len(errors)} of {len(asked)} nodes have no address at which the others could reach them"
        raise join_errors(errors, what, todo=_NAME_A_NETWORK if network is not None else errors[0].todo)
    return chosen


def _check_own(
    asked: Sequence[AddressQuery], facts: Mapping[str, NodeFacts], locate: Callable[[str], str | None]
) -> None:
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
        raised = join_errors(errors, f"{len(errors)} hosts do not have their address", todo=errors[0].todo)
        raised.where = raised.where or "hosts"
        raise raised


def choose(asked: AddressQuery, facts: NodeFacts, network: NetworkSettings | None) -> ChosenAddress:
    """Choose an address in the interface or subnet of `network`; else that of the cluster file; else the one from which
    the node reaches the others.

    With a network a configured address only chooses among those that are in it. Raises PreflightError naming the node,
    what was asked and what is there.
    """
    if network is not None and (network.interface is not None or network.cidr is not None):
        return _in_network(asked, facts, network)
    if asked.configured is not None:
        return _known(facts, asked.configured, "by the cluster file")
    return _routed(asked.node, facts, asked.others)


def _in_network(asked: AddressQuery, facts: NodeFacts, network: NetworkSettings) -> ChosenAddress:
    node, configured = asked.node, asked.configured
    if network.interface is not None:
        wanted, where = f"interface {network.interface}", "network.interface"
        there = [interface for interface in facts.interfaces if interface.name.partition(":")[0] == network.interface]
    else:
        wanted, where = f"an address in {network.cidr}", "network.cidr"
        subnet = _subnet(network.cidr or "")
        there = [interface for interface in facts.interfaces if ipaddress.IPv4Address(interface.address) in subnet]
    if configured is not None:
        wanted += f" that is {configured}"
        there = [interface for interface in there if interface.address == configured]
    if len(there) == 1:
        return _known(facts, there[0].address, f"the network of the deployment is {wanted}")
    what = f"{node} has no {wanted.removeprefix('an ')}"
    if there:
        what = f"{node} has {len(there)} addresses for {wanted}: {_shown(there)}"
    raise PreflightError(
        what,
        where=where,
        cause=f"there: {_shown(facts.interfaces)}",
        todo=f"{_NAME_A_NETWORK}, or leave the node out (exclude_nodes: [{node}])",
    )


def _subnet(text: str) -> ipaddress.IPv4Network:
    try:
        return ipaddress.IPv4Network(text, strict=False)
    except ValueError as error:
        raise RecipeError(f"{text!r} is no IPv4 subnet: {error}", where="network.cidr") from None


def _routed(node: str, facts: NodeFacts, others: Sequence[str]) -> ChosenAddress:
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


def _known(facts: NodeFacts, address: str, why: str) -> ChosenAddress:
    for interface in facts.interfaces:
        if interface.address == address:
            return ChosenAddress(address, interface.name, interface.prefix, why)
    return ChosenAddress(address, None, None, why)


def _shown(there: Sequence[Interface]) -> str:
    return ", ".join(str(interface) for interface in there) or "no interface with an IPv4 address"


def _pairs(sources: Mapping[str, str]) -> str:
    return ", ".join(f"{source} towards {other}" for other, source in sources.items())


def find_addresses(chosen: Mapping[str, ChosenAddress], *, same_subnet: bool) -> list[Finding]:
    """Judge how the addresses of all nodes (by name) fit together. One node alone may have any address.

    `same_subnet`: a network was asked for by name, so that a node in another subnet is a mistake; otherwise it may be
    routed, and is a warning. An address that is twice there is one of a bridge that every host has (docker0), or one
    host under two names.
    """
    if len(chosen) < 2:
        return []
    findings = []
    for node, choice in chosen.items():
        if is_loopback(choice.address):
            need = NodeNeed(node, "address", "an address that other nodes reach")
            findings.append(need.found("failed", f"{choice.address} is loopback", _FIX_NETWORK))
    for address, nodes in _nodes_by({node: choice.address for node, choice in chosen.items()}).items():
        if len(nodes) > 1 and not is_loopback(address):
            need = NodeNeed(ALL_NODES, "address", "an address of its own for each node")
            findings.append(need.found("failed", f"{address} is the address of {', '.join(nodes)}", _FIX_NETWORK))
    subnets = _nodes_by(
        {
            node: str(ipaddress.IPv4Network((choice.address, choice.prefix), strict=False))
            for node, choice in chosen.items()
            if choice.prefix is not None
        }
    )
    if len(subnets) > 1:
        value = "; ".join(f"{subnet}: {', '.join(nodes)}" for subnet, nodes in subnets.items())
        need = NodeNeed(ALL_NODES, "address", "all nodes in one subnet")
        findings.append(need.found("failed" if same_subnet else "warning", value, _FIX_NETWORK))
    if findings:
        return findings
    need = NodeNeed(ALL_NODES, "address", "an address of its own for each node, in one subnet")
    return [need.found("ok", ", ".join(f"{node} {choice.address}" for node, choice in chosen.items()))]


def _nodes_by(values: Mapping[str, str]) -> dict[str, list[str]]:
    """Return value -> the nodes that have it."""
    nodes: dict[str, list[str]] = {}
    for node, value in values.items():
        nodes.setdefault(value, []).append(node)
    return nodes


def find_unnamed_network(
    chosen: Mapping[str, ChosenAddress], facts: Mapping[str, NodeFacts], *, named: bool
) -> list[Finding]:
    """Warn where nodes have several networks and none is `named` for KV, by the recipe or the cluster file.

    Nothing with one node, and nothing where all have one network."""
    if named or len(chosen) < 2:
        return []
    addresses = Counter(
        address for its in facts.values() for address in {interface.address for interface in its.interfaces}
    )
    there = {
        node: [each for each in facts[node].interfaces if _leads_out(each) and addresses[each.address] == 1]
        for node in chosen
    }
    several = {
        node: its
        for node, its in there.items()
        if len({ipaddress.IPv4Network((each.address, each.prefix), strict=False) for each in its}) > 1
    }
    if not several:
        return []
    shown = []
    for node, its in list(several.items())[:_SHOWN_NODES]:
        words = (f"{each}{' (in use)' if each.address == chosen[node].address else ''}" for each in its)
        shown.append(f"{node}: {', '.join(words)}")
    if len(several) > _SHOWN_NODES:
        shown.append(f"and {len(several) - _SHOWN_NODES} more nodes")
    common = set.intersection(*({interface.name for interface in its} for its in there.values()))
    text = (
        "the network for KV by name: without it the route to the other nodes decides, which is often the slow one for "
        "administration"
    )
    fix = f"set network: {{interface: {' or '.join(sorted(common)) or 'NAME'}}} or network: {{cidr: A.B.C.D/N}}"
    value = f"several networks, and none is named: {'; '.join(shown)}"
    return [NodeNeed(ALL_NODES, "network", text).found("warning", value, fix)]


def _leads_out(interface: Interface) -> bool:
    address = ipaddress.IPv4Address(interface.address)
    inside = address.is_loopback or address.is_link_local or interface.name.startswith(_VIRTUAL)
    return interface.up and not inside


class Skew(NamedTuple):
    """A node's clock is so many seconds ahead of the caller's, which may be wrong by so many."""

    seconds: float
    uncertainty: float


def clock_skew(facts: NodeFacts, *, sent: float, received: float) -> Skew:
    """Measure the skew of a node's clock as NTP does: the way there and back counts, the gathering does not.

    `sent` and `received`: time.time() of the caller when it asked for the facts and when it had them; the node must
    have been waiting for the question.
    """
    asked = facts.unix_time - facts.gather_seconds
    ahead = ((asked - sent) + (facts.unix_time - received)) / 2
    return Skew(ahead, max(0.0, (received - sent - facts.gather_seconds) / 2))


def compare(
    plan: Plan,
    facts: Mapping[str, NodeFacts],
    skews: Mapping[str, Skew] | None = None,
    *,
    ours: str | None = None,
) -> list[Finding]:
    """Compare the facts of all nodes of the plan, by name of the node.

    `skews` None: not measured. `ours`: `facts.own_pdserve` of the launcher, where it may be another one than that of
    the nodes."""
    findings = [*_compare_versions(plan, facts), *_compare_pdserve(facts, ours)]
    if len(facts) == 1:
        return [finding.model_copy(update={"node": next(iter(facts))}) for finding in findings]
    return [*findings, *(_compare_clocks(skews) if skews else ()), *_compare_hostnames(facts)]


def _compare_versions(plan: Plan, facts: Mapping[str, NodeFacts]) -> Iterator[Finding]:
    needs = {node: {name for process in processes_on(plan, node) for name in process.packages} for node in facts}
    for node, its in facts.items():
        if needs[node] and its.versions_problem is not None:
            need = NodeNeed(node, "versions", ", ".join(sorted(needs[node])))
            yield need.found("failed", its.versions_problem, "correct engine.python")
    for package in PACKAGES:
        there = {
            node: version for node, its in facts.items() if (version := getattr(its.versions, package)) is not None
        }
        needed = [node for node in facts if package in needs[node] and facts[node].versions_problem is None]
        for node in needed:
            if node not in there:
                fix = "install it there, or name the interpreter that has it with engine.python"
                need = NodeNeed(node, "versions", f"{package} for its engines")
                yield need.found("failed", f"{package} is not installed", fix)
        used = {there[node] for node in needed if node in there}
        if len(set(there.values())) > 1:
            # Where nothing of the plan uses it, it is only strange.
            status: Status = "failed" if len(used) > 1 else "warning"
            fix = "install the same version everywhere, or run all nodes from one environment or image"
            need = NodeNeed(ALL_NODES, "versions", "one version of each package on all nodes")
            yield need.found(status, f"{package} {_by_value(there)}", fix)
        elif used:
            # The plan warns of a version outside of what is known, once for all nodes.
            text = f"{package} the same on all nodes, {KNOWN.get(package, 'any version')}"
            yield NodeNeed(ALL_NODES, "versions", text).found("ok", f"{package} {used.pop()}")


def _compare_pdserve(facts: Mapping[str, NodeFacts], ours: str | None) -> Iterator[Finding]:
    there = {node: its.pdserve for node, its in facts.items()}
    values = set(there.values())
    text = "the same pdserve on all nodes: agents, patches and messages belong together"
    need = NodeNeed(ALL_NODES, "versions", text)
    if len(values) > 1:
        fix = "run all nodes from one installation on a shared folder, or install the same one on each"
        yield need.found("failed", f"pdserve {_by_value(there)}", fix)
    elif ours is not None and ours not in values:
        need = NodeNeed(ALL_NODES, "versions", "the same pdserve there as here: the agents obey this one's launcher")
        fix = "install this one's version there, or in the image; or run pdserve from there"
        yield need.found("failed", f"pdserve {values.pop()} there, {ours} here", fix)
    else:
        yield need.found("ok", f"pdserve {values.pop()}")


def _compare_clocks(skews: Mapping[str, Skew]) -> Iterator[Finding]:
    """Compare the nodes' clocks with each other, not with the launcher's own clock; what may be the measurement's fault
    is not blamed."""
    text = f"clocks of all nodes within {CLOCK_WARNING_SECONDS:.0f} s"
    seconds = sorted(skew.seconds for skew in skews.values())
    base = seconds[len(skews) // 2]
    far = {node: skew for node, skew in skews.items() if _surely_off(skew, base) > CLOCK_WARNING_SECONDS}
    for node, skew in far.items():
        ahead = skew.seconds - base
        status: Status = "failed" if _surely_off(skew, base) > CLOCK_LIMIT_SECONDS else "warning"
        value = f"{abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} the others (+-{skew.uncertainty:.1f} s)"
        fix = "start the time service there (chronyc tracking, timedatectl)"
        yield NodeNeed(node, "clock", text).found(status, value, fix)
    if not far:
        yield NodeNeed(ALL_NODES, "clock", text).found("ok", f"{seconds[-1] - seconds[0]:.1f} s apart at most")


def _surely_off(skew: Skew, base: float) -> float:
    return abs(skew.seconds - base) - skew.uncertainty


def _compare_hostnames(facts: Mapping[str, NodeFacts]) -> Iterator[Finding]:
    """Compare the nodes' hostnames. A name that leads to another machine is not an error: hosts may be reached by any
    name. Two nodes on one machine are seen by their addresses; equal hostnames alone may be a site's carelessness."""
    need = NodeNeed(ALL_NODES, "hostname", "a hostname of its own for each node")
    there = _nodes_by({node: its.hostname for node, its in facts.items()})
    for hostname, nodes in there.items():
        if len(nodes) > 1:
            fix = "if these are one machine, name it once; otherwise nothing breaks, but their logs look alike"
            yield need.found("warning", f"{', '.join(nodes)} all call themselves {hostname}", fix)
    if len(there) == len(facts):
        yield need.found("ok", ", ".join(there))


def _by_value(there: Mapping[str, str]) -> str:
    """Return `0.32.0 on a, b; 0.31.0 on c`, the rarest first: it is the one to look at."""
    rarest_first = sorted(_nodes_by(there).items(), key=lambda item: len(item[1]))
    return "; ".join(f"{value} on {_some(names)}" for value, names in rarest_first)


def _some(nodes: list[str]) -> str:
    return ", ".join(nodes) if len(nodes) <= 4 else f"{', '.join(nodes[:3])} and {len(nodes) - 3} more"
