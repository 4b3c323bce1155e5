"""A hint where nodes have several networks and none is named for KV: pure, over the nodes' facts."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Mapping

from pdserve.preflight.facts import NodeFacts
from pdserve.preflight.finding import ALL_NODES, Finding
from pdserve.preflight.interfaces import Interface
from pdserve.preflight.nodes.address import Chosen

_VIRTUAL = ("docker", "br-", "virbr", "veth", "cni", "cali", "flannel", "cilium", "podman", "lxc", "lxd")
"""Bridges and ends of containers: no way to another node."""
_SHOWN_NODES = 4


def find_unnamed_network(chosen: Mapping[str, Chosen], facts: Mapping[str, NodeFacts], *, named: bool) -> list[Finding]:
    """Nothing with one node, and nothing where all have one network. `named`: by the recipe or the cluster file."""
    if named or len(chosen) < 2:
        return []
    addresses = Counter(
        address for its in facts.values() for address in {interface.address for interface in its.interfaces}
    )
    there = {
        node: [
            interface
            for interface in facts[node].interfaces
            if _leads_out(interface) and addresses[interface.address] == 1
        ]
        for node in chosen
    }
    several = {node: its for node, its in there.items() if len({_subnet(interface) for interface in its}) > 1}
    if not several:
        return []
    shown = [
        f"{node}: " + ", ".join(_shown(interface, chosen[node]) for interface in its)
        for node, its in list(several.items())[:_SHOWN_NODES]
    ]
    if len(several) > _SHOWN_NODES:
        shown.append(f"and {len(several) - _SHOWN_NODES} more nodes")
    common = set.intersection(*({interface.name for interface in its} for its in there.values()))
    names = " or ".join(sorted(common)) or "NAME"
    return [
        Finding(
            node=ALL_NODES,
            check="network",
            status="warning",
            value=f"several networks, and none is named: {'; '.join(shown)}",
            need="the network for KV by name: without it the route to the other nodes decides, which is often the slow "
            "one for administration",
            fix=f"set network: {{interface: {names}}} or network: {{cidr: A.B.C.D/N}}",
        )
    ]


def _leads_out(interface: Interface) -> bool:
    address = ipaddress.IPv4Address(interface.address)
    return (
        interface.up
        and not address.is_loopback
        and not address.is_link_local
        and not interface.name.startswith(_VIRTUAL)
    )


def _subnet(interface: Interface) -> ipaddress.IPv4Network:
    return ipaddress.IPv4Network((interface.address, interface.prefix), strict=False)


def _shown(interface: Interface, chosen: Chosen) -> str:
    return f"{interface.name} {interface.address}/{interface.prefix}" + (
        " (in use)" if interface.address == chosen.address else ""
    )
