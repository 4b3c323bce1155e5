"""Cables and switch of a cluster, inside the sandbox: a namespace for each node, bridges in the login node's."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.cluster.spec import LOGIN, Spec

NAMESPACES = Path("/run/netns")


def build_switch(spec: Spec) -> None:
    """One bridge for each network; the login node has its address there."""
    _ip("netns", "add", LOGIN)
    _ip("-n", LOGIN, "link", "set", "lo", "up")
    for number in range(spec.networks):
        _ip("-n", LOGIN, "link", "add", f"br{number}", "type", "bridge")
        _ip("-n", LOGIN, "addr", "add", f"{spec.address(LOGIN, number)}/24", "dev", f"br{number}")
        _ip("-n", LOGIN, "link", "set", f"br{number}", "up")


def connect(spec: Spec, node: str) -> None:
    """A network namespace with loopback and one cable to each bridge."""
    if node == LOGIN:
        return
    _ip("netns", "add", node)
    _ip("-n", node, "link", "set", "lo", "up")
    for number, port in enumerate(_ports(spec, node)):
        eth = f"eth{number}"
        # A machine has its hardware address for life: peers do not ask again after a reboot.
        octets = [2, 0, *(int(part) for part in spec.address(node, number).split("."))]
        mac = ":".join(f"{octet:02x}" for octet in octets)
        _ip("link", "add", port, "netns", LOGIN, "type", "veth", "peer", "name", eth, "address", mac, "netns", node)
        _ip("-n", LOGIN, "link", "set", port, "master", f"br{number}", "up")
        _ip("-n", node, "addr", "add", f"{spec.address(node, number)}/24", "dev", eth)
        _ip("-n", node, "link", "set", eth, "up")


def disconnect(spec: Spec, node: str) -> None:
    """The node's connections are forgotten: what a peer sends them after the next boot is answered with RST."""
    for port in _ports(spec, node):
        _ip("-n", LOGIN, "link", "del", port)
    _ip("netns", "del", node)


def cable(spec: Spec, node: str, *, plugged: bool) -> None:
    """At the switch's end, so that peers and the node itself see silence and no error."""
    for port in _ports(spec, node):
        _ip("-n", LOGIN, "link", "set", port, "up" if plugged else "down")


def isolate(spec: Spec, node: str, *, isolated: bool) -> None:
    """Isolated nodes do not reach each other, only the others and the login node."""
    for port in _ports(spec, node):
        _run("bridge", "-n", LOGIN, "link", "set", "dev", port, "isolated", "on" if isolated else "off")


def _ports(spec: Spec, node: str) -> list[str]:
    return [f"{node}e{number}" for number in range(spec.networks)]


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")
