"""Port ranges that meet, for deployments that stand on one node. With more nodes the planner knows who meets whom."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pdserve.recipe.connectors.base import ConnectorPort
from pdserve.recipe.connectors.registry import RawSection, ports_of
from pdserve.recipe.effective import publishes_kv_events, roles
from pdserve.recipe.load.problems import Line, Path, Problem
from pdserve.recipe.model import Ports, Recipe
from pdserve.recipe.sections.vllm_router import KIND


@dataclass(frozen=True)
class _Range:
    key: str
    first: int
    count: int
    what: str
    path: Path | None = None
    """Where the port is set, if not below `ports`."""
    roles: tuple[str, ...] = ()
    """Whose instances are counted in it."""

    @property
    def instances(self) -> tuple[Path, ...]:
        return tuple((role, "instances") for role in self.roles)

    @property
    def at(self) -> Path:
        return self.path or ("ports", self.key)

    @property
    def last(self) -> int:
        return self.first + self.count - 1


@dataclass(frozen=True)
class _Blocks:
    """What the processes of a role take of one kind of port: one block each."""

    role: str
    count: int
    size: int


def clashes(recipe: Recipe) -> Iterator[Problem]:
    """Two kinds of port whose ranges meet, and ranges that leave the port space."""
    ranges = list(_ranges(recipe)) if _on_one_node(recipe) else []
    for r in ranges:
        if r.last > 65535:
            what = f"{r.what} needs ports {r.first} to {r.last}, and the last port is 65535"
            yield Problem(r.at, what, _lower(r), also=r.instances)
    for i, a in enumerate(ranges):
        for b in ranges[:i]:
            if a.first <= b.last and b.first <= a.last:
                port = max(a.first, b.first)
                yield Problem(
                    a.at,
                    f"port {port} is needed twice: by {a.what} ({_shown(a)}) and by {b.what} ({_shown(b)})",
                    "move one of them",
                    also=(b.at,),
                    write=_free(a, ranges),
                )


def _on_one_node(recipe: Recipe) -> bool:
    parallels = [(role.instances, role.parallel) for _, role in recipe.roles()]
    devices = sum(count * p.workers for count, p in parallels)
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
    shared: dict[str, list[tuple[ConnectorPort, _Blocks]]] = {}
    events: list[_Blocks] = []
    for name, role, connector in roles(recipe):
        listening = role.instances * role.parallel.servers
        yield _Range(name, getattr(ports, name), listening, f"{name} x{listening}", roles=(name,))
        for port in ports_of(connector) if not isinstance(connector, RawSection) else ():
            if name not in port.roles:
                continue
            blocks = _Blocks(name, listening, port.how_many(role.parallel.ranks_of_server, role.parallel.tp))
            if port.roles == (name,):
                yield _of(port, ports, [blocks])
            else:
                shared.setdefault(port.key, []).append((port, blocks))
        if publishes_kv_events(recipe, name):
            events.append(_Blocks(name, role.instances, role.parallel.dp * 2))
    for some in shared.values():
        yield _of(some[0][0], ports, [blocks for _, blocks in some])
    if events:
        yield _Range("kv_events", ports.kv_events, _in_turn(events), f"KV events x{_used(events)}")
    if recipe.mooncake_store is not None:
        yield _Range("mooncake_master", ports.mooncake_master, 1, "the master of the Mooncake store")
        yield _Range("mooncake_master_http", ports.mooncake_master_http, 1, "that master's HTTP side")
    if recipe.lmcache is not None:
        servers = 1
        if recipe.lmcache.per == "tp-rank":
            servers = max((role.parallel.tp for name, role, _ in roles(recipe) if name in recipe.lmcache.on), default=1)
        yield _Range("lmcache", ports.lmcache, servers, f"LMCache x{servers}")
        yield _Range("lmcache_http", ports.lmcache_http, servers, f"LMCache HTTP x{servers}")


def _of(port: ConnectorPort, ports: Ports, some: Sequence[_Blocks]) -> _Range:
    what = f"{port.what} x{_used(some) // port.count}"
    return _Range(port.key, getattr(ports, port.key), _in_turn(some), what, roles=tuple(each.role for each in some))


def _used(some: Sequence[_Blocks]) -> int:
    return sum(each.count * each.size for each in some)


def _in_turn(some: Sequence[_Blocks]) -> int:
    """Ports from the first to the last, where the roles take blocks of the largest size in turn (plan/ports.py)."""
    size = max(each.size for each in some)
    return max(((each.count - 1) * len(some) + turn) * size + each.size for turn, each in enumerate(some))


def _free(moved: _Range, ranges: list[_Range]) -> Line | None:
    """The nearest place above for a range that meets another one."""
    others = [r for r in ranges if r is not moved]
    for first in sorted(r.last + 1 for r in others if r.last >= moved.first):
        last = first + moved.count - 1
        if last <= 65535 and not any(first <= r.last and r.first <= last for r in others):
            return Line(moved.at, str(first), example=True)
    return None


def _lower(r: _Range) -> str:
    highest = 65536 - r.count
    roles = " and ".join(".".join(map(str, path)) for path in r.instances)
    fewer = f", or lower {roles}" if roles else ""
    return f"begin at {highest} or less{fewer}" if highest >= 1024 else f"lower {roles or 'the number of them'}"


def _shown(r: _Range) -> str:
    return str(r.first) if r.count == 1 else f"{r.first} to {r.last}"
