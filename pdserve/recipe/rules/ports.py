"""Port ranges that meet, for deployments that stand on one node. With more nodes the planner knows who meets whom."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pdserve.recipe.effective import publishes_kv_events, roles, transfer_of
from pdserve.recipe.load.problems import Path, Problem
from pdserve.recipe.model import Recipe
from pdserve.recipe.sections.connectors import Mooncake, Nixl
from pdserve.recipe.sections.vllm_router import KIND

TRANSFER_PORTS = 100
"""Ports of the transfer engines of one instance (plan/ports.py has the same number and the reason)."""


@dataclass(frozen=True)
class _Range:
    key: str
    first: int
    count: int
    what: str
    path: Path | None = None
    """Where the port is set, if not below `ports`."""

    @property
    def at(self) -> Path:
        return self.path or ("ports", self.key)

    @property
    def last(self) -> int:
        return self.first + self.count - 1


def clashes(recipe: Recipe) -> Iterator[Problem]:
    """Two kinds of port whose ranges meet, and ranges that leave the port space."""
    ranges = list(_ranges(recipe)) if _on_one_node(recipe) else []
    for r in ranges:
        if r.last > 65535:
            yield Problem(r.at, f"{r.what} needs ports {r.first} to {r.last}, and the last port is 65535")
    for i, a in enumerate(ranges):
        for b in ranges[:i]:
            if a.first <= b.last and b.first <= a.last:
                port = max(a.first, b.first)
                yield Problem(
                    a.at,
                    f"port {port} is needed twice: by {a.what} ({_shown(a)}) and by {b.what} ({_shown(b)})",
                    "move one of them",
                    also=(b.at,),
                )


def _on_one_node(recipe: Recipe) -> bool:
    parallels = [(role.instances, role.parallel) for _, role in recipe.roles()]
    devices = sum(count * p.tp * p.pp * p.dp for count, p in parallels)
    fits = recipe.platform == "cpu" or not recipe.devices_per_node or devices <= recipe.devices_per_node
    return fits and all(p.nodes == 1 for _, p in parallels)


def _ranges(recipe: Recipe) -> Iterator[_Range]:
    ports = recipe.ports
    yield _Range("proxy", ports.proxy, 1, "the proxy")
    admin = recipe.proxy.admin
    if admin is not None and admin.port is not None:
        yield _Range("admin", admin.port, 1, "the proxy's admin endpoints", ("proxy", "admin", "port"))
    if recipe.proxy.kind == KIND:
        yield _Range("router_metrics", ports.router_metrics, 1, "the router's metrics")
    nixl = transfers = events = 0
    for name, role, connector in roles(recipe):
        yield _Range(name, getattr(ports, name), role.instances, f"{name} x{role.instances}")
        leaf = transfer_of(connector)
        if name == "prefill" and isinstance(leaf, Mooncake):
            yield _Range("bootstrap", ports.bootstrap, role.instances, f"Mooncake bootstrap x{role.instances}")
        if isinstance(leaf, Mooncake):
            transfers += role.instances
        if isinstance(leaf, Nixl):
            nixl += role.instances * role.parallel.dp
        if publishes_kv_events(recipe, name):
            events += role.instances * role.parallel.dp * 2
    if transfers:
        yield _Range("transfer", ports.transfer, transfers * TRANSFER_PORTS, f"Mooncake transfers x{transfers}")
    if nixl:
        yield _Range("nixl", ports.nixl, nixl, f"NIXL side channels x{nixl}")
    if events:
        yield _Range("kv_events", ports.kv_events, events, f"KV events x{events}")
    if recipe.lmcache is not None:
        servers = 1
        if recipe.lmcache.per == "tp-rank":
            servers = max((role.parallel.tp for name, role, _ in roles(recipe) if name in recipe.lmcache.on), default=1)
        yield _Range("lmcache", ports.lmcache, servers, f"LMCache x{servers}")
        yield _Range("lmcache_http", ports.lmcache_http, servers, f"LMCache HTTP x{servers}")


def _shown(r: _Range) -> str:
    return str(r.first) if r.count == 1 else f"{r.first} to {r.last}"
