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


@pytest.mark.full
def test_nixl_reads_from_prefill_over_ucx(hosts: Lab) -> None:
    first, second, _ = hosts.cluster.nodes
    connector = {"kind": "nixl", "buffer_device": "cpu"}
    [finding] = fabric(hosts, hosts.recipe(prefill__connector=connector, decode__connector=connector, lmcache=None))
    assert (finding["node"], finding["status"]) == (second, "ok"), finding
    assert f"{first} -> {second}: " in finding["value"]
    assert "eth0 (MTU 1500) -> eth0 (MTU 1500)" in finding["value"]
    assert f"reads from {hosts.cluster.address(first)}, host memory to host memory" in finding["need"]


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
