"""The checks of a node where this machine really lacks something."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from pdserve.plan.model import Plan
from pdserve.plan.node import Node
from pdserve.preflight.facts import gather
from pdserve.preflight.finding import Finding, failures
from pdserve.preflight.node_checks import check_node, find_run_dir, remove_mark, write_mark
from pdserve.preflight.resources import given_back
from pdserve.system.host import MemoryFacts
from tests.launch.deployment import free_ports
from tests.plan import kit
from tests.preflight.kit import GIB, facts, only
from tests.proxy.test_tls import made
from tests.tables import each_row


def plan(folder: Path, *changes: dict[str, Any], python: str = sys.executable) -> Plan:
    """For the one node `here`, with a model that exists and ports that are free."""
    kinds = ("proxy", "prefill", "decode", "bootstrap", "lmcache", "lmcache_http")
    (folder / "config.json").write_text("{}")
    wanted = kit.recipe(
        {"model": {"path": str(folder)}, "ports": dict(zip(kinds, free_ports(len(kinds)), strict=True))}, *changes
    )
    return kit.plan(wanted, Node(name="here"), python=python)


def look(plan: Plan, **changes: Any) -> list[Finding]:
    return check_node(plan, "here", facts=facts(**changes))


@pytest.mark.process
def test_a_machine_that_lacks_nothing(tmp_path: Path) -> None:
    findings = look(plan(tmp_path, kit.with_lmcache()))
    checks = {"program", "model", "proxy-files", "patches", "ports", "memory", "open-files"}
    assert {finding.check for finding in findings} == checks
    assert {finding.status for finding in findings} == {"ok"}
    assert {finding.node for finding in findings} == {"here"}


@pytest.mark.process
def test_all_problems_at_once(tmp_path: Path) -> None:
    wanted = plan(tmp_path, kit.with_lmcache(l1_size_gb=900_000), python="/no/such/python")
    (tmp_path / "config.json").unlink()
    findings = check_node(wanted, "here", facts=gather(platform="cpu"))
    assert {finding.check for finding in failures(findings)} == {"program", "model", "memory"}
    assert all(finding.fix for finding in failures(findings))


@pytest.mark.process
def test_a_port_in_use_names_its_owner(tmp_path: Path) -> None:
    wanted = plan(tmp_path)
    port = wanted.process("decode-0").ports["http"]
    with socket.create_server(("127.0.0.1", port)):
        finding = only(look(wanted), "ports")
        ours = only(check_node(wanted, "here", facts=facts(), held_by_us=[port]), "ports")
        spared = only(check_node(wanted, "here", facts=facts(), starting=["proxy"]), "ports")
    assert finding.status == "failed"
    assert f"decode-0 needs port {port} (http), held by PID" in finding.evidence[1]
    assert (ours.status, spared.status) == ("ok", "ok")


def replacing(running: Plan, wanted: Plan, names: tuple[str, ...] = ("lmcache-0",)) -> list[Finding]:
    """What is found where 100 GiB are free beside what runs."""
    return check_node(wanted, "here", facts=facts(), starting=names, gives_back=given_back(running, "here", names))


@pytest.mark.process
def test_memory_of_what_is_replaced_counts_as_free(tmp_path: Path) -> None:
    small, large = (plan(tmp_path, kit.with_lmcache(l1_size_gb=size, shm_name="pool")) for size in (20, 200))
    assert only(look(large), "memory").status == "failed"
    finding = only(replacing(large, large), "memory")
    assert (finding.status, finding.value) == ("ok", "300.0 GiB can be used")
    assert finding.need == "200.0 GiB for LMCache's L1 (200.0 GiB of what is replaced counted as free)"
    findings = replacing(small, large)
    assert [finding.check for finding in failures(findings)] == ["memory", "shm"], "no more than the smaller one leaves"
    assert only(findings, "memory").where == "lmcache.l1_size_gb"
    assert not failures(replacing(large, small))


@pytest.mark.process
def test_only_what_runs_on_the_node_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    nodes = Node(name="a", address="192.0.2.1"), Node(name="b", address="192.0.2.2"), Node(name="c")
    wanted = kit.plan(kit.recipe(kit.with_lmcache(l1_size_gb=200), {"model": {"path": str(tmp_path)}}), *nodes)
    assert {process.node for process in wanted.processes} == {"a", "b"}
    on = {
        node.name: {finding.check: finding.status for finding in check_node(wanted, node.name, facts=facts())}
        for node in nodes
    }
    assert on["a"]["memory"] == "failed"
    assert "memory" not in on["b"]
    assert "proxy-files" not in on["b"]
    assert on["c"] == {}


@pytest.mark.process
def test_memory_and_shared_memory_are_two_findings(tmp_path: Path) -> None:
    wanted = plan(tmp_path, kit.with_lmcache(l1_size_gb=10, shm_name="pool"))
    findings = look(wanted, memory=MemoryFacts(available=100 * GIB, shm_free=64 << 20, limit_free=None))
    assert (only(findings, "memory").status, only(findings, "shm").status) == ("ok", "failed")
    assert only(findings, "shm").where == "lmcache.l1_size_gb"
    findings = look(wanted, memory=MemoryFacts(available=100 * GIB, shm_free=20 * GIB, limit_free=4 * GIB))
    assert (only(findings, "memory").status, only(findings, "shm").status) == ("failed", "ok")
    assert "the cgroup allows 4.0 GiB more" in only(findings, "memory").value


@pytest.mark.process
def test_a_proxy_file_that_is_not_there(tmp_path: Path) -> None:
    wanted = plan(tmp_path, {"proxy": {"auth": {"keys_file": str(tmp_path / "keys.jsonl")}}})
    finding = only(look(wanted), "proxy-files")
    assert (finding.status, finding.where) == ("failed", "proxy.auth.keys_file")
    assert f"{tmp_path}/keys.jsonl cannot be read" in finding.value


def towards_workers(folder: Path, **names: str) -> Finding:
    """What is found of a proxy with these files for its workers."""
    tls = {key: str(folder / name) for key, name in names.items()}
    return only(look(plan(folder, {"proxy": {"upstream_tls": tls, "admin": {"port": 29999}}})), "proxy-files")


@pytest.mark.process
def test_certificates_towards_workers_must_be_of_use_to_the_proxy(tmp_path: Path) -> None:
    made(tmp_path, "own")
    made(tmp_path, "other")
    assert towards_workers(tmp_path, ca="own.pem", certificate="own.pem", key="own.key").status == "ok"
    for names, where, message in (
        ({"ca": "no.pem"}, ".ca", "no.pem cannot be read"),
        ({"certificate": "no.pem", "key": "own.key"}, ".certificate", "no.pem cannot be read"),
        ({"certificate": "own.pem", "key": "no.key"}, ".key", "no.key cannot be read"),
        ({"ca": "own.key"}, ".ca", "own.key holds no CA that can be used"),
        ({"certificate": "own.pem", "key": "other.key"}, "", "certificate and key are not usable together"),
    ):
        finding = towards_workers(tmp_path, **names)
        assert (finding.status, finding.where) == ("failed", f"proxy.upstream_tls{where}")
        assert message in finding.value


def test_a_run_directory_that_is_shared_by_nodes_and_launchers(tmp_path: Path) -> None:
    mine, others = write_mark(tmp_path), write_mark(tmp_path)
    left = set(tmp_path.iterdir())
    assert find_run_dir("a", tmp_path, mine, seconds=0).status == "ok"
    assert set(tmp_path.iterdir()) == left, "what the node wrote is gone again"
    remove_mark(tmp_path, mine)
    assert find_run_dir("a", tmp_path, others, seconds=0).status == "ok"
    remove_mark(tmp_path, others)
    assert not list(tmp_path.iterdir())


@each_row("folder, message", [
    ("absent", "does not exist here"), ("other", "is not the launcher's"), ("earlier", "is not the launcher's"),
])  # fmt: skip
def test_a_run_directory_that_is_another_one(tmp_path: Path, folder: str, message: str) -> None:
    for name in ("launchers", "other", "earlier"):
        (tmp_path / name).mkdir()
    mark = write_mark(tmp_path / "launchers")
    write_mark(tmp_path / "earlier")
    finding = find_run_dir("a", tmp_path / folder, mark, seconds=0)
    assert finding.status == "failed"
    assert message in finding.value
    assert "PDSERVE_HOME" in str(finding.fix)


def test_a_file_that_shows_late_is_waited_for(tmp_path: Path) -> None:
    mark = write_mark(tmp_path)
    [file] = tmp_path.iterdir()
    file.rename(tmp_path / "late")

    def appears(_: float) -> None:
        (tmp_path / "late").rename(file)

    assert find_run_dir("a", tmp_path, mark, pause=appears).status == "ok"
