"""Which pairs of nodes will move KV, by the plan, and in which order they are tried: pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from pdserve.plan.frozen import Frozen
from pdserve.plan.model import Plan
from pdserve.plan.process import PlannedConnector
from pdserve.preflight.finding import ALL_NODES, Finding
from pdserve.preflight.of_plan import address_of
from pdserve.recipe.base import TrialTransfer

MOST_ROUNDS = 8
"""Each round takes about two seconds: a node is tried with so many others, not with all of a hundred."""


class End(Frozen):
    """One end of a transfer, as the engine that will be there has it."""

    node: str
    address: str
    connector: str
    """vLLM's class."""
    engine: Literal["mooncake", "nixl"]
    platform: Literal["cpu", "cuda", "rocm"]
    on_device: bool
    """KV is in the memory of a device; otherwise in host memory."""
    protocol: Literal["tcp", "rdma", "ucx"]
    """ucx: UCX chooses among what it finds."""
    devices: str
    """RDMA devices by the recipe, comma separated; empty: the engine chooses."""
    environment: dict[str, str]
    """What the plan sets for that engine. No secrets."""
    process: str
    """The engine whose ports are used: `decode-0`."""

    def by(self, device: str) -> End:
        """The same with this RDMA device alone."""
        return self.model_copy(update={"devices": device})


class Path(Frozen):
    """KV of `source` comes into the memory of `target`."""

    source: End
    target: End
    reads: bool = False
    """`target` reads it; otherwise `source` writes it."""
    rail: str | None = None
    """The RDMA device of both ends, where each is tried by itself."""

    @property
    def caller(self) -> End:
        """The end that does it."""
        return self.target if self.reads else self.source

    @property
    def waiting(self) -> End:
        """The end whose memory is read or written, and whose ports are connected to."""
        return self.source if self.reads else self.target

    def __str__(self) -> str:
        return f"{self.source.node} -> {self.target.node}" + (f" by {self.rail}" if self.rail else "")


class Wish(Frozen):
    """What is asked of the fabric check."""

    python: str | None = None
    """The engines' interpreter; None: the one that runs the probe."""
    min_gbps: float | None = None
    """Less fails; None: any rate will do."""
    rails: bool = False
    """Each RDMA device that the recipe names is tried by itself."""


def paths(plan: Plan) -> tuple[Path, ...]:
    """Each pair of nodes once; what stays on a node is not here."""
    pairs = {
        (source.node, target.node): Path(source=source, target=target, reads=trial.pulled)
        for target, trial in _ends(plan, "decode")
        for source, _ in _ends(plan, "prefill")
        if source.node != target.node and source.connector == target.connector
    }
    return tuple(pairs.values())


def by_rails(wanted: Sequence[Path]) -> list[Path]:
    """Each path once for each of its rails: the first device of one end with the first of the other, and so on."""
    railed = []
    for path in wanted:
        ours, theirs = (end.devices.split(",") for end in (path.source, path.target))
        if len(ours) != len(theirs) or len(ours) < 2:
            railed.append(path)
            continue
        for here, there in zip(ours, theirs, strict=True):
            source, target = path.source.by(here), path.target.by(there)
            rail = here if here == there else f"{here} and {there}"
            railed.append(path.model_copy(update={"source": source, "target": target, "rail": rail}))
    return railed


def rounds(wanted: Sequence[Path]) -> list[list[Path]]:
    """Each path once, in rounds in which no node is the source or the target of two: they would share its link. All
    rails of a pair come before another pair of its nodes."""
    sources = list(dict.fromkeys(path.source.node for path in wanted))
    targets = list(dict.fromkeys(path.target.node for path in wanted))
    width = max(len(sources), len(targets))
    done: dict[tuple[int, str | None], list[Path]] = {}
    for path in wanted:
        shift = (targets.index(path.target.node) - sources.index(path.source.node)) % width
        done.setdefault((shift, path.rail), []).append(path)
    return list(done.values())


def find_untried(plan: Plan) -> Finding | None:
    """Why this plan has nothing to try; None: it has."""
    if paths(plan):
        return None
    connectors = [connector for process in plan.processes for connector in process.connectors]
    kinds = sorted({connector.class_name for connector in connectors})
    value = f"no transfer was tried: the connectors of the plan are {', '.join(kinds) or 'none'}"
    fix = "only Mooncake and NIXL over UCX are tried: start the deployment, and pdserve verify proves its transfers"
    if any(connector.trial is not None for connector in connectors):
        value, fix = "no transfer was tried: no prefill and decode are on different nodes", "pdserve verify RECIPE"
    return _untried(value, fix)


def find_not_reached() -> Finding:
    """Of a plan whose nodes do not reach each other: nothing was tried."""
    return _untried("no transfer was tried: nodes do not reach each other", "correct the findings about reach first")


def _untried(value: str, fix: str) -> Finding:
    need = "a transfer for each pair of nodes"
    return Finding(node=ALL_NODES, check="fabric", status="unknown", value=value, need=need, fix=fix)


def _ends(plan: Plan, role: str) -> Iterator[tuple[End, TrialTransfer]]:
    """For each node the first of its engines of that role."""
    seen = set()
    for process in plan.processes:
        for connector in process.connectors:
            trial = connector.trial
            if process.role != role or trial is None or process.node in seen:
                continue
            if trial.ports not in {*process.ports, *process.port_ranges}:
                continue
            seen.add(process.node)
            end = End(
                node=process.node,
                address=address_of(plan, process.node),
                connector=connector.class_name,
                engine=trial.engine,
                platform=plan.platform,
                on_device=plan.platform != "cpu" and not trial.host_buffer,
                protocol="ucx" if trial.engine == "nixl" else _protocol(connector),
                devices=",".join(connector.rdma_devices or ()),
                environment=process.env.set,
                process=process.name,
            )
            yield end, trial


def _protocol(connector: PlannedConnector) -> Literal["tcp", "rdma"]:
    return "tcp" if connector.rdma_devices is None else "rdma"
