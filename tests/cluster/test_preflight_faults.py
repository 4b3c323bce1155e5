"""What is wrong with one node is found before anything is started on any: node, value, need and fix.

That it is looked for on the other nodes too; what is found is the matter of tests/preflight.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.deployments import Lab
from tests.cluster.spec import LOGIN

pytestmark = pytest.mark.cluster


def refused(hosts: Lab, recipe: Path, cluster: Path) -> str:
    """What `up` says: exit 3, and no process was started anywhere."""
    done = hosts.pdserve(LOGIN, "up", recipe, "--cluster", cluster)
    assert done.returncode == 3, done.stdout + done.stderr
    assert not list(hosts.home.glob("fake/*/logs/agent@*"))
    assert not (hosts.home / "fake/current").exists()
    return done.stderr


@contextmanager
def covered(hosts: Lab, node: str, folder: Path, options: str = "size=1m") -> Iterator[None]:
    """An empty file system over a folder, on one node only."""
    hosts.cluster.output(node, ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)])
    try:
        yield
    finally:
        hosts.cluster.output(node, ["umount", str(folder)])


def python_that(hosts: Lab, name: str, before: str) -> Path:
    """An interpreter, as a host of a cluster file may name one, with something done before it."""
    script = hosts.folder / name
    script.write_text(f'#!/bin/bash\n{before}\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return script


def test_a_model_that_one_node_does_not_have(hosts: Lab) -> None:
    other = hosts.cluster.nodes[1]
    recipe = hosts.recipe()
    with covered(hosts, other, hosts.folder / "model"):
        output = refused(hosts, recipe, hosts.hosts())
    assert other in output
    assert str(hosts.folder / "model") in output


def test_all_hosts_that_do_not_answer_are_named_in_one_error_in_the_words_of_ssh(hosts: Lab) -> None:
    _, second, third = hosts.cluster.nodes
    with hosts.cluster.silent(second, third):
        output = refused(hosts, hosts.recipe(), hosts.hosts(count=3))
    assert f"error: 2 of 3 nodes cannot be looked at: {second}, {third}" in output
    for node in (second, third):
        assert f"| probe@{node}: nothing can be started on {node}\n  |   ssh: connect to host" in output


def test_all_failures_are_reported_at_once_and_as_data(hosts: Lab) -> None:
    """A model, the size of /dev/shm, a limit and a port, each on one node only."""
    first, second, _ = hosts.cluster.nodes
    python = python_that(hosts, "few-files", "ulimit -n 256")
    recipe = hosts.recipe(lmcache__l1_size_gb=1, lmcache__shm_name="l1")
    port = hosts.port("decode")
    squatter = ["python3", "-um", "http.server", str(port)]
    with (
        covered(hosts, first, hosts.folder / "model"),
        covered(hosts, first, Path("/dev/shm"), "size=100m"),
        hosts.cluster.popen(second, squatter, cwd=hosts.folder) as server,
    ):
        assert server.stdout is not None
        server.stdout.readline()
        cluster = hosts.hosts(python={second: python})
        done = hosts.pdserve(LOGIN, "preflight", recipe, "--cluster", cluster, "--json")
        server.kill()
    assert done.returncode == 3, done.stdout + done.stderr
    failures = {
        (finding["check"], finding["node"]): finding
        for finding in json.loads(done.stdout)
        if finding["status"] == "failed"
    }
    assert {("open-files", second), ("model", first), ("ports", second), ("shm", first)} <= failures.keys(), done.stdout
    assert "soft 256, hard 256" in str(failures["open-files", second])
    assert f"decode-0 needs port {port}" in str(failures["ports", second])
    assert "100 MiB are free" in str(failures["shm", first])
