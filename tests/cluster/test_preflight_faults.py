"""What is wrong with one node is found before anything is started on any: node, value, need and fix.

That it is looked for on the other nodes too; what is found is the matter of tests/preflight.
"""

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


@pytest.mark.full
def test_another_pdserve_on_one_node(hosts: Lab) -> None:
    other = hosts.cluster.nodes[1]
    copy = hosts.folder / "other"
    shutil.copytree(REPOSITORY / "pdserve", copy / "pdserve", ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "pdserve/version_of_yesterday.py").write_text("# differs\n")
    python = python_that(hosts, "other-pdserve", f"export PYTHONPATH={copy}")
    output = refused(hosts, hosts.recipe(), hosts.hosts(python={other: python}))
    assert other in output
    assert "the same pdserve on all nodes" in output
    assert "run all nodes from one installation" in output


@pytest.mark.full
def test_a_run_directory_that_a_host_does_not_share(hosts: Lab) -> None:
    other = hosts.cluster.nodes[1]
    hosts.home.mkdir()
    with covered(hosts, other, hosts.home):
        output = refused(hosts, hosts.recipe(), hosts.hosts())
    assert f"run-dir on {other}" in output


def test_all_hosts_that_do_not_answer_are_named_in_one_error_in_the_words_of_ssh(hosts: Lab) -> None:
    first, second, third = hosts.cluster.nodes
    file = hosts.folder / "three.yaml"
    names = [{"name": node} for node in (first, second, third)]
    file.write_text(json.dumps({"schema": 1, "ssh": {"config": str(hosts.cluster.ssh_config)}, "hosts": names}))
    with hosts.cluster.silent(second, third):
        output = refused(hosts, hosts.recipe(), file)
    assert f"error: 2 of 3 nodes cannot be looked at: {second}, {third}" in output
    for node in (second, third):
        assert f"| probe@{node}: nothing can be started on {node}\n  |   ssh: connect to host" in output


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("IdentityFile=/dev/null", "Permission denied (publickey)"),
        ("UserKnownHostsFile=/dev/null", "Host key verification failed"),
        ("Port=2222", "Connection refused"),
    ],
)
@pytest.mark.full
def test_a_host_that_refuses_is_named_in_the_words_of_ssh(hosts: Lab, option: str, words: str) -> None:
    config = hosts.folder / "ssh_config"
    # The first value of a setting wins, but identities add up.
    text = hosts.cluster.ssh_config.read_text()
    config.write_text(text.replace("IdentityFile", "#") if option.startswith("IdentityFile") else text)
    output = refused(hosts, hosts.recipe(), hosts.hosts(ssh={"config": str(config), "options": [option]}))
    first, other, _ = hosts.cluster.nodes
    assert f"error: 2 of 2 nodes cannot be looked at: {first}, {other}" in output
    assert output.count(words) == 2, output


def test_nodes_that_do_not_reach_each_other(hosts: Lab) -> None:
    first, second, _ = hosts.cluster.nodes
    with hosts.cluster.isolated(first, second):
        output = refused(hosts, hosts.recipe(), hosts.hosts())
    assert first in output
    assert second in output
    assert "reach" in output


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
