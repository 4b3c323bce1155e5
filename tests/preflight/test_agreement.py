"""How nodes fit together: versions, clocks, names."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.plan.model import Plan
from pdserve.preflight.agreement import Skew, clock_skew, compare
from pdserve.preflight.facts import NodeFacts
from pdserve.preflight.finding import Finding, strange
from tests.plan import kit
from tests.preflight.kit import facts

NODES = kit.hosts(0, 0, 0)
"""host0 has prefill and the proxy, host1 decode, host2 nothing."""


def plan(*changes: dict[str, Any]) -> Plan:
    return kit.plan(kit.recipe(kit.with_lmcache(), *changes), *NODES)


def nodes_with(**changes: dict[str, Any]) -> dict[str, NodeFacts]:
    return {node.name: facts(hostname=node.name, **changes.get(node.name, {})) for node in NODES}


def versions(**changes: str | None) -> dict[str, Any]:
    return {"versions": kit.VERSIONS.model_copy(update=changes)}


def find(check: str, facts_of: dict[str, NodeFacts], wanted: Plan | None = None) -> list[Finding]:
    return [finding for finding in compare(wanted or plan(), facts_of) if finding.check == check]


def bad(findings: list[Finding]) -> list[tuple[str, str, str]]:
    return [(finding.node, finding.status, finding.value) for finding in findings if finding.status != "ok"]


def test_nodes_that_agree() -> None:
    findings = compare(plan(), nodes_with(), {node.name: Skew(0.01, 0.1) for node in NODES})
    assert {finding.status for finding in findings} == {"ok"}
    assert {finding.check for finding in findings} == {"versions", "clock", "hostname"}
    assert "vllm 0.32.0" in {finding.value for finding in findings}


def test_a_pdserve_that_is_not_the_launchers() -> None:
    """In an image, say, while all nodes have the same."""
    node = {"host0": facts(pdserve_version="0.0.1", pdserve_digest="0123")}
    assert [one.status for one in compare(plan(), node, ours="0.0.1 (0123)")].count("failed") == 0
    failed = [one for one in compare(plan(), node, ours="0.0.2 (4567)") if one.status == "failed"]
    assert [(one.node, one.check) for one in failed] == [("host0", "versions")]
    assert failed[0].value == "pdserve 0.0.1 (0123) there, 0.0.2 (4567) here"


def test_one_node_alone_has_only_versions_to_compare() -> None:
    findings = compare(plan(), {"host0": facts()}, {"host0": Skew(99, 0)})
    assert {(finding.node, finding.check) for finding in findings} == {("host0", "versions")}


def test_versions_that_differ_where_engines_run() -> None:
    findings = find("versions", nodes_with(host1=versions(vllm="0.31.0")))
    assert bad(findings) == [("all nodes", "failed", "vllm 0.31.0 on host1; 0.32.0 on host0, host2")]


def test_a_version_where_nothing_uses_it_is_only_strange() -> None:
    findings = find("versions", nodes_with(host2=versions(vllm="0.31.0")))
    assert bad(findings) == [("all nodes", "warning", "vllm 0.31.0 on host2; 0.32.0 on host0, host1")]


def test_a_package_that_a_node_lacks() -> None:
    findings = find("versions", nodes_with(host1=versions(mooncake=None), host2=versions(vllm=None)))
    assert bad(findings) == [("host1", "failed", "mooncake is not installed")]


def test_lmcache_is_needed_on_its_nodes_only() -> None:
    assert bad(find("versions", nodes_with(host1=versions(lmcache=None)))) == []
    assert bad(find("versions", nodes_with(host0=versions(lmcache=None)))) == [
        ("host0", "failed", "lmcache is not installed")
    ]


def test_of_a_version_outside_of_what_is_known_one_up_warns_once() -> None:
    there = nodes_with(**{node.name: versions(vllm="0.99.0") for node in NODES})
    wanted = kit.plan(kit.recipe(), *NODES, versions=there["host0"].versions)
    warnings = [*wanted.warnings, *strange(compare(wanted, there))]
    assert [text for text in warnings if "0.99.0" in text] == [
        "vllm 0.99.0 is outside what is known (>=0.26,<0.34); tested with 0.32.0"
    ]


def test_an_interpreter_that_cannot_be_run() -> None:
    problem = {"versions": kit.VERSIONS.model_validate({}), "versions_problem": "/opt/x cannot be used"}
    assert bad(find("versions", nodes_with(host1=problem))) == [("host1", "failed", "/opt/x cannot be used")]


def test_a_command_of_the_recipe_needs_no_package() -> None:
    nothing = {node.name: versions(vllm=None, lmcache=None, mooncake=None, nixl=None) for node in NODES}
    own = plan({"engine": {"command": ["serve"]}, "lmcache": {"command": ["cache"]}})
    assert bad(find("versions", nodes_with(**nothing), own)) == []


@pytest.mark.parametrize("change", [{"pdserve_version": "1.1"}, {"pdserve_digest": "fedcba9876543210"}])
def test_another_pdserve(change: dict[str, str]) -> None:
    [(node, status, value)] = bad(find("versions", nodes_with(host2=change)))
    assert (node, status) == ("all nodes", "failed")
    assert value.endswith("on host2; 1.0 (0123456789abcdef) on host0, host1")


@pytest.mark.parametrize(
    ("skew", "status"),
    [
        (Skew(1.5, 0), None),
        (Skew(3.0, 0), "warning"),
        (Skew(-3.0, 0), "warning"),
        (Skew(3.0, 1.5), None),
        (Skew(60.0, 1.0), "failed"),
        (Skew(-3600.0, 1.0), "failed"),
    ],
)
def test_clocks(skew: Skew, status: str | None) -> None:
    skews = {"host0": Skew(0.1, 0.05), "host1": skew, "host2": Skew(-0.1, 0.05)}
    findings = [finding for finding in compare(plan(), nodes_with(), skews) if finding.check == "clock"]
    assert [(finding.node, finding.status) for finding in findings] == (
        [("all nodes", "ok")] if status is None else [("host1", status)]
    )


def test_nodes_are_compared_with_each_other_not_with_the_launcher() -> None:
    skews = {node.name: Skew(500.0, 0.1) for node in NODES}
    assert [finding.status for finding in compare(plan(), nodes_with(), skews) if finding.check == "clock"] == ["ok"]


def test_skew_as_ntp_measures_it() -> None:
    # Asked at 100 by our clock; half a second there, 4 s of gathering, half a second back; its clock is 7 s ahead.
    skew = clock_skew(facts(unix_time=100 + 0.5 + 4 + 7, gather_seconds=4.0), sent=100.0, received=105.0)
    assert skew == pytest.approx((7.0, 0.5))


def test_equal_hostnames() -> None:
    findings = find("hostname", {node.name: facts(hostname="localhost") for node in NODES})
    assert bad(findings) == [("all nodes", "warning", "host0, host1, host2 all call themselves localhost")]
