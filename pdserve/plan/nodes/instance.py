"""One engine instance, placed: what each of its processes has, and which of them has an API server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.plan.nodes.node import Node
from pdserve.recipe.model import Parallel, Role
from pdserve.roles import EngineRole


@dataclass(frozen=True)
class Share:
    """What one process of an instance has: devices of one node."""

    node: Node
    devices: tuple[int, ...]
    workers: int


@dataclass(frozen=True)
class Instance:
    """One engine instance. The first share is the leader's: the other processes meet there.

    The processes have ranks in the order of their shares. With external load balancing that is the data-parallel rank,
    else the rank of the node.
    """

    role_name: EngineRole
    index: int
    role: Role
    shares: tuple[Share, ...]

    @property
    def name(self) -> str:
        """The leader's process name."""
        return f"{self.role_name}-{self.index}"

    @property
    def leader(self) -> Share:
        return self.shares[0]

    @property
    def balances_itself(self) -> bool:
        """One API server has all ranks behind it, on whatever node."""
        return self.role.parallel.load_balancing == "internal"

    def process_name(self, rank: int) -> str:
        """The name of the process of that rank."""
        if rank == 0:
            return self.name
        return f"{self.name}-{'rank' if self.role.parallel.load_balancing == 'external' else 'node'}{rank}"

    def has_server(self, rank: int) -> bool:
        """Whether the process of that rank has an API server. The others are its followers."""
        return rank == 0 or not self.balances_itself

    def server_of(self, rank: int) -> str:
        """The name of the process whose API server the engines of that process belong to."""
        return self.process_name(rank) if self.has_server(rank) else self.name

    def dp_ranks(self, rank: int) -> range:
        """The data-parallel ranks whose ports are those of that process: with one API server for all, every rank."""
        each = self.role.parallel.ranks_of_server
        first = 0 if self.balances_itself else rank * each
        return range(first, first + each)


def split_by_process(parallel: Parallel, shares: Sequence[Share]) -> tuple[Share, ...]:
    """What an instance has on each node, divided among its processes there."""
    each = parallel.processes // parallel.nodes
    return tuple(
        Share(
            share.node,
            share.devices[i * len(share.devices) // each : (i + 1) * len(share.devices) // each],
            share.workers // each,
        )
        for share in shares
        for i in range(each)
    )
