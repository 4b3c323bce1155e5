"""What a check found, as data: it travels from the nodes to the command line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from pdserve.errors import PdserveError, PreflightError
from pdserve.plan.model import Frozen, Plan

Status = Literal["ok", "failed", "unknown", "warning"]
"""unknown: nothing could be learnt (a tool is missing); it stops nothing."""

Check = Literal[
    "address",
    "network",
    "hostname",
    "clock",
    "plan",
    "sizes",
    "versions",
    "patches",
    "run-dir",
    "program",
    "model",
    "proxy-files",
    "ports",
    "memory",
    "shm",
    "memlock",
    "open-files",
    "devices",
    "gpu-processes",
    "environment",
    "firmware",
    "rdma",
    "reach",
    "fabric",
]

ALL_NODES = "all nodes"
"""The node of a finding that is about how the nodes fit together."""


class Finding(Frozen):
    """One check of one node."""

    node: str
    check: Check
    status: Status
    value: str
    """What there is."""
    need: str
    """What the plan needs."""
    fix: str | None = None
    where: str | None = None
    """Key of the recipe that asks for it, where there is one."""
    evidence: tuple[str, ...] = ()
    unverified_on_hardware: bool = False
    """The check was written against recorded output of the tools, never run beside the hardware that it is about."""

    def line(self) -> str:
        """On one line, without the evidence."""
        text = f"{self.status}: {self.check} on {self.node}: {self.value}; needed: {self.need}"
        if self.unverified_on_hardware:
            text += " (unverified on hardware)"
        return f"{text}; fix: {self.fix}" if self.fix else text


def of_error(node: str, check: Check, need: str, error: PdserveError) -> Finding:
    """A check that raises, as a finding."""
    evidence = (f"likely cause: {error.cause}", *error.evidence) if error.cause else error.evidence
    return Finding(
        node=node,
        check=check,
        status="failed",
        value=error.what,
        need=need,
        fix=error.todo,
        where=error.where,
        evidence=evidence,
    )


def of_plan(plan: Plan) -> list[Finding]:
    """What the plan warns of, as findings, for a list of findings only."""
    node = plan.nodes[0].name if len(plan.nodes) == 1 else ALL_NODES
    need = "nothing that is known to go wrong"
    return [Finding(node=node, check="plan", status="warning", value=text, need=need) for text in plan.warnings]


def of_several_nodes(findings: Iterable[Finding]) -> list[Finding]:
    """The same finding of several nodes becomes one, with all their names."""
    nodes: dict[Finding, list[str]] = {}
    for finding in findings:
        nodes.setdefault(finding.model_copy(update={"node": ""}), []).append(finding.node)
    return [finding.model_copy(update={"node": ", ".join(names)}) for finding, names in nodes.items()]


def failed(findings: Iterable[Finding]) -> list[Finding]:
    """Those that keep the plan from being started."""
    return [finding for finding in findings if finding.status == "failed"]


def strange(findings: Iterable[Finding]) -> list[str]:
    """What stops nothing and should be known, a line each."""
    warnings = of_several_nodes(finding for finding in findings if finding.status == "warning")
    return [finding.line().removeprefix("warning: ") for finding in warnings]


def raise_failed(findings: Sequence[Finding]) -> None:
    """Raises PreflightError with everything that failed. Of a single one it is the error itself."""
    bad = failed(findings)
    if len(bad) == 1:
        [only] = bad
        raise PreflightError(
            f"{only.check} on {only.node}: {only.value}; needed: {only.need}",
            where=only.where,
            todo=only.fix,
            evidence=only.evidence,
        )
    if bad:
        nodes = len({finding.node for finding in bad})
        raise PreflightError(
            f"{len(bad)} checks failed" + (f" on {nodes} nodes" if nodes > 1 else f" on {bad[0].node}"),
            todo="each line below has its fix; pdserve preflight RECIPE shows them again, starting nothing",
            evidence=tuple(text for finding in bad for text in (finding.line(), *(f"  {e}" for e in finding.evidence))),
        )
