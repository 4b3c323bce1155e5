"""Edges that the sizes of a recipe cross, as findings: the numbers are those of `pdserve plan`."""

from __future__ import annotations

from collections.abc import Iterable

from pdserve.plan.model import Plan
from pdserve.preflight.finding import ALL_NODES, Finding
from pdserve.sizing import Crossing


def of_crossings(plan: Plan, crossings: Iterable[Crossing]) -> list[Finding]:
    """An error is a failed check, a warning stays a warning."""
    node = plan.nodes[0].name if len(plan.nodes) == 1 else ALL_NODES
    return [
        Finding(
            node=node,
            check="sizes",
            status="failed" if crossing.severity == "error" else "warning",
            value=crossing.what,
            need="sizes that fit each other (pdserve plan shows all of them)",
            fix=crossing.todo,
            where=crossing.where,
        )
        for crossing in crossings
    ]
