"""Every port of a deployment, in one table, and the check that no two processes of a node get the same one.

A process that runs keeps its ports. Another one gets the next of its kind on its node. Where prefill and decode share a
kind there, they take turns in it, so that one more instance of a role moves no port of the other.

What cannot be pinned, and what is known of it (mooncake-transfer-engine 0.3.13, vLLM 0.32, measured):

* Mooncake's transfer engine takes one port for its handshake RPC and, over TCP, one for data, for each engine worker,
  at random from MC_MIN_RPC_PORT..MC_MAX_RPC_PORT (15000-17000 by default), trying others when one is taken. Both
  listen on every interface; MC_TCP_BIND_ADDRESS does not change that. Each instance gets a range of its own here.
* Mooncake's side channel (ZMQ, one a prefill worker) binds a port of the system's choice on VLLM_HOST_IP. It is read
  from the bootstrap server's /query once the engine is up.
* vLLM's own rendezvous between the workers of one node: random, on the loopback or node address, and gone once the
  workers are connected. VLLM_PORT would pin them, and makes instances race for the same ports, so it is unset.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

from pdserve.errors import RecipeError
from pdserve.plan.process import PortRange
from pdserve.plan.running import NOTHING, RunningProcesses
from pdserve.recipe.connectors.base import ConnectorPort
from pdserve.recipe.connectors.registry import SECTIONS
from pdserve.recipe.model import Recipe
from pdserve.roles import ENGINE_ROLES, ProcessRole, is_engine


@dataclass(frozen=True)
class Row:
    """Describes one kind of port."""

    purpose: str
    owner: str
    how_many: str
    used_by: str
    chosen: bool = False
    """A range out of which the process chooses."""


def _row_of(port: ConnectorPort) -> Row:
    each = "ranks" if port.per_rank else "tp" if port.per_worker else ""
    many = "a range" if port.chosen else f"{port.count} * {each}" if each else str(port.count)
    return Row(port.purpose, f"{port.what} of an instance", many, port.used_by, port.chosen)


TABLE: dict[str, Row] = {
    "proxy": Row("http", "the proxy", "1", "clients"),
    "prefill": Row("http", "API server of a prefill instance", "1", "proxy, status, verify"),
    "decode": Row("http", "API server of a decode instance", "1", "proxy, status, verify"),
    "aggregated": Row("http", "API server of an aggregated instance", "1", "proxy, status, verify"),
    **{port.key: _row_of(port) for section in SECTIONS for port in section.ABOUT.ports},
    # vLLM adds the DP rank to the first one of each half: where it publishes, and where it repeats.
    "kv_events": Row("kv_events", "KV events of an instance, if asked for", "2 * dp", "proxy; binds 0.0.0.0"),
    "router_metrics": Row("metrics", "vllm-router as the proxy", "1", "Prometheus, over loopback"),
    # One server a node that hosts an attached role, or one a TP rank there.
    "lmcache": Row("request", "LMCache server", "1", "engines of its node, over loopback"),
    "lmcache_http": Row("http", "LMCache server", "1", "launcher and status, over loopback"),
    # On the first node; its HTTP side on loopback.
    "mooncake_master": Row("rpc", "master of the Mooncake store", "1", "engines"),
    "mooncake_master_http": Row("http", "master of the Mooncake store", "1", "launcher, over loopback"),
    # Rendezvous, and with dp > 1 the RPC of its engines.
    "dp_master": Row("dp_master", "leader of an instance of several processes", "1 or 2", "the others"),
}
"""Recipe key under `ports` -> what takes its ports. The first process of a node gets the port of the recipe, further
ones what follows."""


SET_ELSEWHERE: dict[str, Row] = {
    "proxy.admin.port": Row("admin", "the proxy's admin endpoints", "1", "administrators"),
}
"""The same for ports with a key of their own: the whole key -> what takes the port."""


@dataclass(frozen=True)
class Need:
    """A process's request for `count` ports in a row."""

    node: str
    process: str
    role: ProcessRole = field(kw_only=True)
    key: str
    count: int = 1
    port: int | None = None
    """The first one; None: the next that is free from the recipe's on."""

    @property
    def purpose(self) -> str:
        return self.row.purpose

    @property
    def row(self) -> Row:
        return TABLE[self.key] if self.key in TABLE else SET_ELSEWHERE[self.key]

    @property
    def where(self) -> str:
        """Return the recipe's key for the port."""
        return f"ports.{self.key}" if self.key in TABLE else self.key


class AssignedPorts:
    """The ports of every process, and which recipe key each came from."""

    def __init__(self, recipe: Recipe, needs: Sequence[Need], running: RunningProcesses = NOTHING) -> None:
        """Give each process its ports. Raises RecipeError when two processes of a node get the same port, or one is
        past 65535."""
        self._ranges: dict[tuple[str, str], range] = {}
        self._chosen = {(need.process, need.purpose) for need in needs if need.row.chosen}
        kept = {need: taken for need in needs if len(taken := _keep_range(recipe, need, running)) == need.count}
        series: dict[tuple[str, str], _Series] = {}
        for need in needs:
            series.setdefault((need.node, need.key), _Series(recipe)).add(need, running)
        per_node: dict[str, list[tuple[range, Need]]] = defaultdict(list)
        for need in needs:
            taken = kept[need] if need in kept else series[need.node, need.key].next_of(need)
            if taken.stop > 65536:
                raise RecipeError(
                    f"{need.process} would get port {taken.stop - 1} ({need.purpose}), past 65535",
                    where=need.where,
                    todo=f"lower {need.where}",
                )
            self._ranges[need.process, need.purpose] = taken
            per_node[need.node].append((taken, need))
        for node, claims in per_node.items():
            _check(node, claims)

    def range(self, process: str, purpose: str) -> range:
        """Return all ports of that purpose; empty if the process has none."""
        return self._ranges.get((process, purpose), range(0))

    def first(self, process: str, purpose: str) -> int:
        """Return the first port of that purpose. Raises KeyError if the process has none."""
        return self._ranges[process, purpose].start

    def pinned(self, process: str) -> dict[str, int]:
        """Return the ports that this process will listen on, by purpose; a second one of a purpose is `kv_events-1`."""
        return {
            purpose if index == 0 else f"{purpose}-{index}": port
            for (name, purpose), ports in self._ranges.items()
            if name == process and (name, purpose) not in self._chosen
            for index, port in enumerate(ports)
        }

    def chosen(self, process: str) -> dict[str, PortRange]:
        """Return the ranges out of which this process chooses, by purpose."""
        return {
            purpose: PortRange(first=ports.start, last=ports.stop - 1)
            for (name, purpose), ports in self._ranges.items()
            if name == process and (name, purpose) in self._chosen
        }


class _Series:
    """The ports of one kind on one node: blocks of the same size, the roles in turn."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._size = 0
        self._blocks: dict[ProcessRole, int] = {}
        """Role -> the blocks that were looked at for it."""
        self._held: dict[str, range] = {}
        """By processes that run, also by those that go: others may be started before they have gone."""

    def add(self, need: Need, running: RunningProcesses) -> None:
        """Add a need. All needs are added before the first is given its ports."""
        self._size = max(self._size, need.count)
        if need.role in self._blocks:
            return
        self._blocks[need.role] = 0
        if not running.moves(need.key, self._recipe.ports):
            for role in ENGINE_ROLES if is_engine(need.role) else (need.role,):
                self._held |= running.ports(role, need.node, need.purpose)

    def next_of(self, need: Need) -> range:
        """Return the next block of its role in which no other process has a port."""
        if need.port is not None:
            return range(need.port, need.port + need.count)
        turn = list(self._blocks).index(need.role)
        while True:
            block = self._blocks[need.role] * len(self._blocks) + turn
            self._blocks[need.role] += 1
            first = getattr(self._recipe.ports, need.key) + block * self._size
            taken = range(first, first + need.count)
            if not any(_overlap(taken, held) for name, held in self._held.items() if name != need.process):
                return taken


def _keep_range(recipe: Recipe, need: Need, running: RunningProcesses) -> range:
    if need.port is not None or running.moves(need.key, recipe.ports):
        return range(0)
    return running.ports(need.role, need.node, need.purpose).get(need.process, range(0))


def _overlap(a: range, b: range) -> bool:
    return a.start < b.stop and b.start < a.stop


def _check(node: str, claims: Sequence[tuple[range, Need]]) -> None:
    for (a, first), (b, second) in combinations(claims, 2):
        if _overlap(a, b):
            raise RecipeError(
                f"port {max(a.start, b.start)} on {node} goes to {first.process} ({first.purpose}) and to "
                f"{second.process} ({second.purpose})",
                where=second.where,
                cause=f"{first.process} takes {_text(a)} from {first.where}, {second.process} {_text(b)} from "
                f"{second.where}; each counts up by instance",
                todo=f"move one of them: --set {second.where}=PORT or --set {first.where}=PORT",
            )


def _text(ports: range) -> str:
    return str(ports.start) if len(ports) == 1 else f"{ports.start}-{ports.stop - 1}"
