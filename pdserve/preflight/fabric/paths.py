"""Which pairs of nodes will move KV, by the plan, and in which order they are tried: pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from pdserve.plan.frozen import Frozen
from pdserve.plan.model import Plan, PlannedConnector, Process
from pdserve.preflight.finding import ALL_NODES, Finding
from pdserve.preflight.of_plan import address_of

ENGINE = "MooncakeConnector"
_TRANSFER = "transfer"
MOST_ROUNDS = 8
"""Each round takes about two seconds: a node is tried with so many others, not with all of a hundred."""


class End(Frozen):
    """One end of a transfer, as the engine that will be there has it."""

    node: str
    address: str
    protocol: Literal["tcp", "rdma"]
    devices: str
    """RDMA devices by the recipe, comma separated; empty: the engine chooses."""
    environment: dict[str, str]
    """What the plan sets for that engine. No secrets."""
    process: str
    """The engine whose ports are used: `decode-0`."""


class Path(Frozen):
    """KV of `source` is written into the memory of `target`."""

    source: End
    target: End

    def __str__(self) -> str:
        return f"{self.source.node} -> {self.target.node}"


class Wish(Frozen):
    """What is asked of the fabric check."""

    python: str | None = None
    """The engines' interpreter; None: the one that runs the probe."""
    min_gbps: float | None = None
    """Less fails; None: any rate will do."""


def paths(plan: Plan) -> tuple[Path, ...]:
    """Each pair of nodes once; what stays on a node is not here."""
    pairs = {
        (source.node, target.node): Path(source=source, target=target)
        for target in _ends(plan, "decode")
        for source in _ends(plan, "prefill")
        if source.node != target.node
    }
    return tuple(pairs.values())


def rounds(wanted: Sequence[Path]) -> list[list[Path]]:
    """Each path once, in rounds in which no node is the source or the target of two: they would share its link."""
    sources = list(dict.fromkeys(path.source.node for path in wanted))
    targets = list(dict.fromkeys(path.target.node for path in wanted))
    width = max(len(sources), len(targets))
    done: dict[int, list[Path]] = {}
    for path in wanted:
        shift = (targets.index(path.target.node) - sources.index(path.source.node)) % width
        done.setdefault(shift, []).append(path)
    return list(done.values())


def find_untried(plan: Plan) -> Finding | None:
    """Why this plan has nothing to try; None: it has."""
    if paths(plan):
        return None
    kinds = sorted({connector.class_name for process in plan.processes for connector in process.connectors})
    value = f"no transfer was tried: the connectors of the plan are {', '.join(kinds) or 'none'}"
    fix = f"only {ENGINE} is supported: start the deployment and run pdserve verify, which proves its transfers"
    if ENGINE in kinds:
        value, fix = "no transfer was tried: no prefill and decode are on different nodes", "pdserve verify RECIPE"
    return _untried(value, fix)


def find_not_reached() -> Finding:
    """Of a plan whose nodes do not reach each other: nothing was tried."""
    return _untried("no transfer was tried: nodes do not reach each other", "correct the findings about reach first")


def _untried(value: str, fix: str) -> Finding:
    need = "a transfer for each pair of nodes"
    return Finding(node=ALL_NODES, check="fabric", status="unknown", value=value, need=need, fix=fix)


def _ends(plan: Plan, role: str) -> Iterator[End]:
    """For each node the first of its engines of that role."""
    seen = set()
    for process in plan.processes:
        connector = _mooncake(process)
        if process.role == role and connector is not None and process.node not in seen:
            seen.add(process.node)
            yield End(
                node=process.node,
                address=address_of(plan, process.node),
                protocol="tcp" if connector.rdma_devices is None else "rdma",
                devices=",".join(connector.rdma_devices or ()),
                environment=process.env.set,
                process=process.name,
            )


def _mooncake(process: Process) -> PlannedConnector | None:
    """Its connector that moves KV, if it has the ports for it."""
    if _TRANSFER not in process.port_ranges:
        return None
    return next((connector for connector in process.connectors if connector.class_name == ENGINE), None)
