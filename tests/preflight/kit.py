"""Facts of a node that lacks nothing, plus what a test changes; and code that runs in a network of its own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from pdserve.plan.model import Plan
from pdserve.plan.node import Node
from pdserve.preflight.facts import Limit, NodeFacts
from pdserve.preflight.finding import Finding
from pdserve.preflight.links import Interface
from pdserve.system.host import MemoryFacts
from tests.namespaces import unshared
from tests.plan import kit

GIB = 1 << 30
UNLIMITED = Limit(soft=None, hard=None)


def facts(**changes: Any) -> NodeFacts:
    """Of a well-kept machine with one network."""
    values: dict[str, Any] = {
        "hostname": "host0",
        "kernel": "6.8.0",
        "python": "3.12.3",
        "interpreter": "/opt/venv/bin/python",
        "pdserve_version": "1.0",
        "pdserve_digest": "0123456789abcdef",
        "versions": kit.VERSIONS,
        "unix_time": 1000.0,
        "gather_seconds": 0.0,
        "interfaces": (LOOPBACK, interface("eth0", "10.1.0.1", 24)),
        "routes": {},
        "devices_present": tuple(range(8)),
        "devices_visible": tuple(range(8)),
        "device_variables": {},
        "memory": MemoryFacts(available=100 * GIB, shm_free=100 * GIB, limit_free=None),
        "memory_total": 128 * GIB,
        "memlock": UNLIMITED,
        "ipc_lock": False,
        "open_files": UNLIMITED,
    }
    return NodeFacts(**(values | changes))


def interface(name: str, address: str, prefix: int, *, up: bool = True) -> Interface:
    return Interface(name=name, address=address, prefix=prefix, up=up)


LOOPBACK = interface("lo", "127.0.0.1", 8)


def here(*changes: dict[str, Any], python: str = sys.executable) -> Plan:
    """A plan for one node, named `here`."""
    return kit.plan(kit.recipe(*changes), Node(name="here", devices=tuple(range(8))), python=python)


def only(findings: Sequence[Finding], check: str) -> Finding:
    """The one finding of that check."""
    [match] = [finding for finding in findings if finding.check == check]
    return match


def in_namespace(code: str, *, network: Sequence[str] = ()) -> Any:
    """What `code` prints as JSON, in a user and network namespace of its own that has loopback and what the `ip`
    commands of `network` add to it. Nothing of it can reach the machine's own network."""
    script = " && ".join(["ip link set lo up", *(f"ip {command}" for command in network), 'exec "$0" -c "$1"'])
    return unshared("--net", "sh", "-c", script, sys.executable, code)
