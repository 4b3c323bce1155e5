"""Findings of checks, as data: they travel from the nodes to the command line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from pdserve.errors import PdserveError, PreflightError
from pdserve.plan.model import Frozen, Plan
from pdserve.plan.process import Process
from pdserve.sizing import Crossing

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
        """Return the finding on one line, without the evidence."""
        text = f"{self.status}: {self.check} on {self.node}: {self.value}; needed: {self.need}"
        if self.unverified_on_hardware:
            text += " (unverified on hardware)"
        return f"{text}; fix: {self.fix}" if self.fix else text


@dataclass(frozen=True)
class NodeNeed:
    """A need of a plan at one node, which makes the findings about it."""

    node: str
    check: Check
    text: str
    unverified: bool = False
    """As `Finding.unverified_on_hardware`."""

    def found(
        self,
        status: Status,
        value: str,
        fix: str | None = None,
        evidence: Sequence[str] = (),
        *,
        where: str | None = None,
    ) -> Finding:
        """Return the finding that there is `value`."""
        return Finding(
            node=self.node,
            check=self.check,
            status=status,
            value=value,
            need=self.text,
            fix=fix,
            where=where,
            evidence=tuple(evidence),
            unverified_on_hardware=self.unverified,
        )

    def refused(self, error: PdserveError) -> Finding:
        """Return the finding of a check that has raised `error`."""
        evidence = (f"likely cause: {error.cause}", *error.evidence) if error.cause else error.evidence
        return self.found("failed", error.what, error.todo, evidence, where=error.where)


def processes_on(plan: Plan, node: str) -> tuple[Process, ...]:
    """Return the processes of a node, in plan order."""
    return tuple(process for process in plan.processes if process.node == node)


def find_warnings(plan: Plan) -> list[Finding]:
    """Return what the plan warns of, for a list of findings only."""
    need = NodeNeed(_whole(plan), "plan", "nothing that is known to go wrong")
    return [need.found("warning", text) for text in plan.warnings]


def judge_crossings(plan: Plan, crossings: Iterable[Crossing]) -> list[Finding]:
    """Return the edges that the sizes of a recipe cross: an error is a failed check, a warning stays one."""
    need = NodeNeed(_whole(plan), "sizes", "sizes that fit each other (pdserve plan shows all of them)")
    return [
        need.found(
            "failed" if crossing.severity == "error" else "warning", crossing.what, crossing.todo, where=crossing.where
        )
        for crossing in crossings
    ]


def _whole(plan: Plan) -> str:
    return plan.nodes[0].name if len(plan.nodes) == 1 else ALL_NODES


def failures(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings that keep the plan from being started."""
    return [finding for finding in findings if finding.status == "failed"]


def summarize_warnings(findings: Iterable[Finding]) -> list[str]:
    """Return what stops nothing and should be known, a line each: what several nodes share once, with their names."""
    nodes: dict[Finding, list[str]] = {}
    for finding in findings:
        if finding.status == "warning":
            nodes.setdefault(finding.model_copy(update={"node": ""}), []).append(finding.node)
    warnings = [finding.model_copy(update={"node": ", ".join(names)}) for finding, names in nodes.items()]
    return [warning.line().removeprefix("warning: ") for warning in warnings]


def raise_failed(findings: Sequence[Finding]) -> None:
    """Raise one PreflightError for all checks that failed, if any did. A single failure is the error itself."""
    bad = failures(findings)
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


def join_errors(
    errors: Sequence[PreflightError], what: str, *, todo: str | None, also: Sequence[str] = ()
) -> PreflightError:
    """Join the errors of several nodes into one, `what`, so that all can be corrected at once. A single error stays
    itself.

    Each is among the evidence, and what they have in common is given once. `also`: further lines.
    """
    first = errors[0]
    if len(errors) == 1:
        first.evidence = (*first.evidence, *also)
        return first
    where = first.where if all(error.where == first.where for error in errors) else None
    cause = first.cause if all(error.cause == first.cause for error in errors) else None
    lines: list[str] = []
    for error in errors:
        lines.append(error.what if error.where in (None, where) else f"{error.where}: {error.what}")
        if error.cause and error.cause != cause:
            lines.append(f"  {error.cause}")
        lines.extend(f"  {line}" for line in error.evidence)
    return PreflightError(what, where=where, cause=cause, todo=todo, evidence=(*lines, *also))
