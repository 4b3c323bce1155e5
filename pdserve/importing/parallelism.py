"""The flags of an instance's parallelism -> the section `parallel` of its role."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pdserve.importing.launch import Effect, EngineLaunch, Note, Sourced
from pdserve.importing.tracked_tree import whole
from pdserve.recipe.load import show
from pdserve.recipe.sections import LoadBalancing
from pdserve.roles import EngineRole

_SIZES = {
    "tp": "tensor-parallel-size",
    "pp": "pipeline-parallel-size",
    "pcp": "prefill-context-parallel-size",
    "dp": "data-parallel-size",
}
_LOCAL = "data-parallel-size-local"


@dataclass(frozen=True)
class ImportedParallel:
    """The section of a role, and what was not carried over."""

    section: dict[str, Sourced]
    notes: tuple[Note, ...]


def taken(
    engines: EngineLaunch, role: EngineRole, devices_per_node: Sourced | None, *, cached: bool
) -> ImportedParallel:
    """Takes the flags out of `engines.args`. `cached`: the role attaches to an LMCache server."""
    reader = _Reader(engines, role)
    sizes = {key: reader.size(key, flag) for key, flag in _SIZES.items()}
    ranks = math.prod(sizes.values())
    reader.experts(several=sizes["tp"] * sizes["pcp"] * sizes["dp"] > 1)
    reader.devices(ranks)
    each = whole(devices_per_node.value) if devices_per_node is not None else None
    nodes = -(-ranks // each) if each and each > 0 else None
    if nodes is not None and nodes > 1:
        reader.section["nodes"] = (engines.devices or engines.at).of(nodes)
    reader.balancing(sizes["dp"], nodes, cached=cached)
    return ImportedParallel(reader.section, tuple(reader.notes))


def counted(at: Sourced, of: str, notes: list[Note]) -> int:
    """How many there are; 1, and a note, where the value does not say it."""
    number = whole(at.value)
    if number is not None and number > 0:
        return number
    notes.append(Note(at, f"{show.value(at.value)} is no number of {of}: 1 is used", "served"))
    return 1


class _Reader:
    def __init__(self, engines: EngineLaunch, role: EngineRole) -> None:
        self.engines, self.args, self.role = engines, engines.args, role
        self.section: dict[str, Sourced] = {}
        self.notes: list[Note] = []

    def size(self, key: str, flag: str) -> int:
        """One of the sizes whose product are the ranks."""
        at = self.args.pop(flag, None)
        if at is None:
            return 1
        number = counted(at, "ranks", self.notes)
        if number > 1:
            self.section[key] = at.of(number)
        return number

    def experts(self, *, several: bool) -> None:
        """Whether they are spread over the ranks."""
        at = self.args.pop("enable-expert-parallel", None)
        if at is None or at.value is not True:
            return
        if several:
            self.section["ep"] = at
        else:
            self._note(at, "there is one rank, which has all experts", "replaced")

    def devices(self, ranks: int) -> None:
        """What the file has of them beside the flags, which decide."""
        at = self.engines.devices
        if at is not None and (given := whole(at.value)) != ranks:
            shown = show.value(at.value) if given is None else given
            self._note(at, f"{shown} devices for an instance, and its flags use {ranks}: pdserve gives it {ranks}")

    def balancing(self, dp: int, nodes: int | None, *, cached: bool) -> None:
        """Which API servers an instance has. `nodes`: those that it spans; None: the file does not have their size."""
        mode, at = self._asked()
        if at is None:
            return
        key = f"{self.role}.parallel"
        if nodes is None and mode == "hybrid" and (nodes := self._nodes_of_flags(dp)) is not None and nodes > 1:
            self.section["nodes"] = at.of(nodes)
        if dp == 1:
            self._note(at, "there is one data-parallel rank, and nobody chooses among them", "replaced")
        elif cached:
            why = "pdserve connects LMCache to instances with one API server only, which chooses among all ranks"
            self._note(at, f"{why}: take {self.role} out of lmcache.on and set {key}.load_balancing: {mode}")
        elif mode == "hybrid" and nodes is None:
            why = "the file does not have over how many nodes"
            self._note(at, f"{why}: set {key}.nodes, and {key}.load_balancing: {mode}")
        elif mode == "hybrid" and nodes == 1:
            self._note(at, "on one node that is one API server for all ranks", "replaced")
        elif dp % (nodes or 1):
            why = f"{dp} ranks over {nodes} nodes, and with {mode} load balancing every node has whole ranks"
            self._note(at, f"{why}: set {key}.dp to a multiple of the nodes, and {key}.load_balancing: {mode}")
        else:
            # With one rank on each node vLLM takes it for external load balancing (engine/arg_utils.py).
            self.section["load_balancing"] = at.of("external" if mode == "hybrid" and dp == nodes else mode)

    def _asked(self) -> tuple[LoadBalancing, Sourced | None]:
        """A rank of an engine makes its load balancing external, and the first rank of a node with the number of its
        ranks makes it hybrid (vllm/engine/arg_utils.py, create_engine_config)."""
        for mode in ("external", "multi-port-external", "hybrid"):
            flag = f"data-parallel-{mode}-lb"
            if flag in self.args and self.args[flag].value is True:
                return "hybrid" if mode == "hybrid" else "external", self.args.pop(flag)
        if (rank := self.args.get("data-parallel-rank")) is not None:
            return "external", rank
        if _LOCAL in self.args and "headless" not in self.args:
            return "hybrid", self.args.get("data-parallel-start-rank")
        return "internal", None

    def _nodes_of_flags(self, dp: int) -> int | None:
        """By the number of nodes, or of ranks on each."""
        nnodes, local = (whole(at.value) if (at := self.args.get(name)) else None for name in ("nnodes", _LOCAL))
        nodes = nnodes or (dp // local if local and dp % local == 0 else None)
        return nodes if nodes and dp % nodes == 0 else None

    def _note(self, at: Sourced, why: str, effect: Effect = "served") -> None:
        self.notes.append(Note(at, why, effect))
