"""A real transfer between nodes before anything starts there: Mooncake over TCP, between namespaces of a lab."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.deployments import Lab
from tests.cluster.spec import LOGIN
from tests.launch.deployment import REPOSITORY

pytestmark = pytest.mark.cluster


def fabric(hosts: Lab, recipe: Path, *options: str) -> list[dict[str, Any]]:
    """What the check reports, and that its helpers are gone."""
    done = hosts.pdserve(LOGIN, "preflight", recipe, "--cluster", hosts.hosts(), "--fabric", "--json", *options)
    assert done.stdout, done.stderr
    seen = [finding for finding in json.loads(done.stdout) if finding["check"] == "fabric"]
    for node in hosts.cluster.nodes:
        assert not [argv for _, argv in hosts.cluster.processes(node) if "-c" in argv]
    return seen


@contextmanager
def rule(hosts: Lab, node: str, *words: str) -> Iterator[None]:
    """A routing rule of a node, which here does what a firewall would do."""
    hosts.cluster.output(node, ["ip", "rule", "add", *words])
    try:
        yield
    finally:
        hosts.cluster.output(node, ["ip", "rule", "del", *words])


@contextmanager
def slow(hosts: Lab, node: str, rate: str) -> Iterator[None]:
    """What the node sends goes at this rate."""
    where = ["dev", "eth0", "root"]
    shaping = ["tbf", "rate", rate, "burst", "32kb", "latency", "400ms"]
    hosts.cluster.output(node, ["tc", "qdisc", "add", *where, *shaping])
    try:
        yield
    finally:
        hosts.cluster.output(node, ["tc", "qdisc", "del", *where])


def test_a_link_that_works_is_reported_with_its_rate(hosts: Lab) -> None:
    first, second, _ = hosts.cluster.nodes
    [finding] = fabric(hosts, hosts.recipe())
    assert (finding["node"], finding["status"]) == (first, "ok"), finding
    assert f"{first} -> {second}: " in finding["value"]
    assert "Gbit/s" in finding["value"]
    assert "eth0 (MTU 1500) -> eth0 (MTU 1500)" in finding["value"]
    assert "host memory to host memory" in finding["need"]


def test_a_firewall_that_drops_one_port_of_the_range(hosts: Lab) -> None:
    """The first port stands for the range where nodes are only connected to."""
    first, second, _ = hosts.cluster.nodes
    with rule(hosts, second, "ipproto", "tcp", "sport", "15001-15099", "blackhole"):
        [finding] = fabric(hosts, hosts.recipe())
    assert finding["status"] == "failed"
    assert f"{first} -> {second} at {hosts.cluster.address(second)}, port 150" in finding["value"]
    assert finding["value"].endswith(": no answer within 2 s")
    assert "a firewall drops it" in finding["evidence"][0]
    assert "ports.transfer" in finding["fix"]


def over_nixl(hosts: Lab, **changes: Any) -> Path:
    """The recipe with NIXL, whose decode pulls."""
    connector = {"kind": "nixl", "buffer_device": "cpu"}
    return hosts.recipe(prefill__connector=connector, decode__connector=connector, lmcache=None, **changes)


@pytest.mark.full
def test_nixl_reads_from_prefill_over_ucx(hosts: Lab) -> None:
    first, second, _ = hosts.cluster.nodes
    [finding] = fabric(hosts, over_nixl(hosts))
    assert (finding["node"], finding["status"]) == (second, "ok"), finding
    assert f"{first} -> {second}: " in finding["value"]
    assert "eth0 (MTU 1500) -> eth0 (MTU 1500)" in finding["value"]
    assert f"reads from {hosts.cluster.address(first)}, host memory to host memory" in finding["need"]


@pytest.mark.full
def test_ports_of_nixl_that_a_firewall_drops(hosts: Lab) -> None:
    """UCX takes them out of the range that it is given, else any of the system's."""
    first, _, _ = hosts.cluster.nodes
    recipe = over_nixl(hosts, engine__env={"UCX_TCP_PORT_RANGE": "12000-12999"})
    with rule(hosts, first, "ipproto", "tcp", "sport", "12000-12999", "blackhole"):
        [finding] = fabric(hosts, recipe)
    assert finding["status"] == "failed"
    assert f" at {hosts.cluster.address(first)}, port 12" in finding["value"]
    assert "no answer within 2 s" in finding["value"]
    assert "UCX_TCP_PORT_RANGE" in finding["fix"]


@pytest.mark.full
def test_a_link_that_is_slower_than_asked_for(hosts: Lab) -> None:
    with slow(hosts, hosts.cluster.nodes[0], "20mbit"):
        [finding] = fabric(hosts, hosts.recipe(), "--min-gbps", "0.1")
    assert finding["status"] == "failed"
    rate = float(finding["value"].partition(": ")[2].split()[0])
    assert 0 < rate < 0.1
    assert "at least 0.1 Gbit/s" in finding["need"]
    assert "slow or shared link" in finding["evidence"][0]


@pytest.mark.full
def test_packets_that_leave_by_another_address_and_another_mtu(hosts: Lab) -> None:
    first, second, _ = hosts.cluster.nodes
    other = "10.77.0.99"
    hosts.cluster.output(first, ["ip", "addr", "add", f"{other}/24", "dev", "eth0"])
    hosts.cluster.output(second, ["ip", "link", "set", "eth0", "mtu", "1400"])
    cluster = hosts.hosts()
    document = json.loads(cluster.read_text())
    document["hosts"][0]["address"] = other
    cluster.write_text(json.dumps(document))
    try:
        done = hosts.pdserve(LOGIN, "preflight", hosts.recipe(), "--cluster", cluster, "--fabric", "--json")
    finally:
        hosts.cluster.output(first, ["ip", "addr", "del", f"{other}/24", "dev", "eth0"])
        hosts.cluster.output(second, ["ip", "link", "set", "eth0", "mtu", "1500"])
    seen = [finding for finding in json.loads(done.stdout) if finding["check"] == "fabric"]
    warnings = [finding["value"] for finding in seen if finding["status"] == "warning"]
    assert warnings == [
        f"{first} -> {second}: packets leave from {hosts.cluster.address(first)}, not from {other} (eth0 (MTU 1500))",
        f"{first} -> {second}: MTU 1500 on eth0, 1400 on eth0",
    ]


@pytest.mark.full
def test_nodes_that_do_not_reach_each_other_are_not_tried(hosts: Lab) -> None:
    first, second, _ = hosts.cluster.nodes
    for node in (first, second):
        hosts.cluster.isolate(node)
    try:
        [finding] = fabric(hosts, hosts.recipe())
    finally:
        for node in (first, second):
            hosts.cluster.join(node)
    assert (finding["status"], finding["value"]) == (
        "unknown",
        "no transfer was tried: nodes do not reach each other",
    )


@pytest.mark.full
def test_up_tries_it_before_engines_start_and_the_recipe_can_leave_it_out(hosts: Lab) -> None:
    """With real engines, which are not started."""
    first, second, _ = hosts.cluster.nodes
    recipe = REPOSITORY / "recipes/tiny-cpu.yaml"
    nodes = ("--set", "slurm.nodes=2", "--cluster", hosts.hosts())
    with rule(hosts, second, "ipproto", "tcp", "sport", "15001-15099", "blackhole"):
        done = hosts.pdserve(LOGIN, "up", recipe, *nodes)
        without = hosts.pdserve(LOGIN, "up", recipe, *nodes, "--set", "fabric.check=false", "--set", "model.path=/none")
    assert done.returncode == 3, done.stdout + done.stderr
    assert f"fabric on {first}: {first} -> {second}" in done.stderr
    assert "fabric" not in without.stderr
    assert not list(hosts.home.glob("tiny-cpu/*/logs/agent@*"))
