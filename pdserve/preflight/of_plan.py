"""Where the processes of a plan are: pure."""

from __future__ import annotations

from pdserve.plan.model import Plan
from pdserve.plan.process import Process


def on_node(plan: Plan, node: str) -> tuple[Process, ...]:
    """The processes of a node, in plan order."""
    return tuple(process for process in plan.processes if process.node == node)


def address_of(plan: Plan, node: str) -> str:
    """KeyError if the plan has no such node."""
    return plan.node(node).address
