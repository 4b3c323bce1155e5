"""Whether the nodes fit together: versions, clocks, names. Pure, over the facts of all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pdserve.installed.versions import KNOWN, PACKAGES
from pdserve.plan.model import Plan
from pdserve.preflight.facts import NodeFacts
from pdserve.preflight.finding import ALL_NODES, Check, Finding, Status
from pdserve.preflight.of_plan import on_node

CLOCK_WARNING_SECONDS = 2.0
"""Nothing that pdserve decides compares clocks of two nodes, but people do: beyond this, lines of two logs or events of
two nodes no longer stand in the order in which they happened."""
CLOCK_LIMIT_SECONDS = 30.0
"""No machine with a working time service is so far off, so that the next minutes make it worse: Slurm's munge and
Kerberos (NFS) refuse what is 300 s old, and certificates and tokens are refused as not valid yet."""


class Skew(NamedTuple):
    """How far a node's clock is ahead of the caller's, in seconds, and how far that may be wrong."""

    seconds: float
    uncertainty: float


def clock_skew(facts: NodeFacts, *, sent: float, received: float) -> Skew:
    """`sent` and `received`: time.time() of the caller when it asked for the facts and when it had them; the node must
    have been waiting for the question. As NTP does it: the way there and back counts, the gathering does not."""
    asked = facts.unix_time - facts.gather_seconds
    ahead = ((asked - sent) + (facts.unix_time - received)) / 2
    return Skew(ahead, max(0.0, (received - sent - facts.gather_seconds) / 2))


def compare(
    plan: Plan,
    facts: Mapping[str, NodeFacts],
    skews: Mapping[str, Skew] | None = None,
    *,
    ours: str | None = None,
) -> list[Finding]:
    """Findings over the facts of all nodes of the plan, by name of the node. `skews`: None: not measured. `ours`:
    `facts.own_pdserve` of the launcher, where it may be another one than that of the nodes."""
    findings = [
        *_versions(plan, facts),
        *_pdserve(facts, ours),
        *(_clocks(skews) if skews and len(facts) > 1 else ()),
        *(_hostnames(facts) if len(facts) > 1 else ()),
    ]
    return (
        [finding.model_copy(update={"node": next(iter(facts))}) for finding in findings]
        if len(facts) == 1
        else findings
    )


def _versions(plan: Plan, facts: Mapping[str, NodeFacts]) -> Iterator[Finding]:
    needs = {node: frozenset(name for process in on_node(plan, node) for name in process.packages) for node in facts}
    for node, node_facts in facts.items():
        if needs[node] and node_facts.versions_problem is not None:
            yield _finding(
                "versions", node, "failed", node_facts.versions_problem, _listed(needs[node]), "correct engine.python"
            )
    for package in PACKAGES:
        there = {
            node: version
            for node, node_facts in facts.items()
            if (version := getattr(node_facts.versions, package)) is not None
        }
        needed = [node for node in facts if package in needs[node] and facts[node].versions_problem is None]
        for node in needed:
            if node not in there:
                fix = "install it there, or name the interpreter that has it with engine.python"
                yield _finding(
                    "versions", node, "failed", f"{package} is not installed", f"{package} for its engines", fix
                )
        used = {there[node] for node in needed if node in there}
        if len(set(there.values())) > 1:
            # Where nothing of the plan uses it, it is only strange.
            status: Status = "failed" if len(used) > 1 else "warning"
            fix = "install the same version everywhere, or run all nodes from one environment or image"
            need = "one version of each package on all nodes"
            yield _finding("versions", ALL_NODES, status, f"{package} {_by_value(there)}", need, fix)
        elif used:
            # The plan warns of a version outside of what is known, once for all nodes.
            need = f"{package} the same on all nodes, {KNOWN.get(package, 'any version')}"
            yield _finding("versions", ALL_NODES, "ok", f"{package} {used.pop()}", need)


def _pdserve(facts: Mapping[str, NodeFacts], ours: str | None) -> Iterator[Finding]:
    there = {node: node_facts.pdserve for node, node_facts in facts.items()}
    need = "the same pdserve on all nodes: agents, patches and messages belong together"
    if len(set(there.values())) > 1:
        fix = "run all nodes from one installation on a shared folder, or install the same one on each"
        yield _finding("versions", ALL_NODES, "failed", f"pdserve {_by_value(there)}", need, fix)
    elif there and ours not in (None, *there.values()):
        value = f"pdserve {next(iter(there.values()))} there, {ours} here"
        need = "the same pdserve there as here: the agents obey this one's launcher"
        fix = "install this one's version there, or in the image; or run pdserve from there"
        yield _finding("versions", ALL_NODES, "failed", value, need, fix)
    elif there:
        yield _finding("versions", ALL_NODES, "ok", f"pdserve {next(iter(there.values()))}", need)


def _clocks(skews: Mapping[str, Skew]) -> Iterator[Finding]:
    """Against each other, not against the launcher's own clock; what may be the measurement's fault is not blamed."""
    base = sorted(skew.seconds for skew in skews.values())[len(skews) // 2]
    worst: Status = "ok"
    need = f"clocks of all nodes within {CLOCK_WARNING_SECONDS:.0f} s"
    for node, skew in skews.items():
        ahead = skew.seconds - base
        sure = abs(ahead) - skew.uncertainty
        if sure <= CLOCK_WARNING_SECONDS:
            continue
        worst = "failed" if sure > CLOCK_LIMIT_SECONDS else "warning"
        value = f"{abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} the others (+-{skew.uncertainty:.1f} s)"
        fix = "start the time service there (chronyc tracking, timedatectl)"
        yield _finding("clock", node, worst, value, need, fix)
    if worst == "ok":
        spread = max(skew.seconds for skew in skews.values()) - min(skew.seconds for skew in skews.values())
        yield _finding("clock", ALL_NODES, "ok", f"{spread:.1f} s apart at most", need)


def _hostnames(facts: Mapping[str, NodeFacts]) -> Iterator[Finding]:
    """A name that leads to another machine is not an error: hosts may be reached by any name. Two nodes on one machine
    are seen by their addresses; equal hostnames alone may be a site's carelessness."""
    there: dict[str, list[str]] = {}
    for node, node_facts in facts.items():
        there.setdefault(node_facts.hostname, []).append(node)
    for hostname, nodes in there.items():
        if len(nodes) > 1:
            value, need = f"{', '.join(nodes)} all call themselves {hostname}", "a hostname of its own for each node"
            fix = "if these are one machine, name it once; otherwise nothing breaks, but their logs look alike"
            yield _finding("hostname", ALL_NODES, "warning", value, need, fix)
    if len(there) == len(facts):
        yield _finding("hostname", ALL_NODES, "ok", ", ".join(there), "a hostname of its own for each node")


def _finding(check: Check, node: str, status: Status, value: str, need: str, fix: str | None = None) -> Finding:
    return Finding(node=node, check=check, status=status, value=value, need=need, fix=fix)


def _listed(names: frozenset[str]) -> str:
    return ", ".join(sorted(names))


def _by_value(there: Mapping[str, str]) -> str:
    """`0.32.0 on a, b; 0.31.0 on c`, the rarest first: it is the one to look at."""
    nodes: dict[str, list[str]] = {}
    for node, value in there.items():
        nodes.setdefault(value, []).append(node)
    return "; ".join(
        f"{value} on {_some(names)}" for value, names in sorted(nodes.items(), key=lambda item: len(item[1]))
    )


def _some(nodes: list[str]) -> str:
    return ", ".join(nodes) if len(nodes) <= 4 else f"{', '.join(nodes[:3])} and {len(nodes) - 3} more"
