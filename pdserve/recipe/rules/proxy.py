"""Rules of the proxy, pdserve's own or vllm-router, and of all ports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pdserve.recipe.connectors.base import ConnectorPort
from pdserve.recipe.connectors.registry import RawSection, ports_of
from pdserve.recipe.effective import args_of, policy_of, publishes_kv_events, roles
from pdserve.recipe.load.problems import Line, Path, Problem
from pdserve.recipe.model import ROUTER_POLICIES, ROUTER_SETTINGS, VLLM_ROUTER, Ports, Recipe
from pdserve.recipe.rules.engines import flag_path
from pdserve.roles import ENGINE_ROLES

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_KNOWS_PREFIXES = ("prefix_aware", "kv_events")


def admission_pools(recipe: Recipe) -> Iterator[Problem]:
    """Refuse settings of a pool that the mode does not have: they would be ignored without a word."""
    proxy = recipe.proxy
    there = [name for name, _ in recipe.roles()]
    for section, settings in (("routing", proxy.routing), ("admission", proxy.admission)):
        for pool in ENGINE_ROLES:
            if pool not in there and pool in settings.model_fields_set:
                yield Problem(
                    ("proxy", section, pool),
                    f"mode {recipe.mode} has no pool {pool}",
                    f"set it for {' and '.join(there)}, or change the mode",
                    also=(("mode",),),
                )
    if recipe.mode == "aggregated":
        if proxy.on_empty_pool == "aggregate":
            yield Problem(
                ("proxy", "on_empty_pool"),
                "there is one pool, so no other pool can take over when it is empty",
                "write wait or fail",
                also=(("mode",),),
            )
        if proxy.routing.conditional is not None:
            yield Problem(
                ("proxy", "routing", "conditional"),
                "mode aggregated has no prefill that could be skipped",
                "remove it",
                also=(("mode",),),
            )


def conditional_routing(recipe: Recipe) -> Iterator[Problem]:
    """Refuse conditions that are never met, and sessions that nothing names."""
    routing = recipe.proxy.routing
    conditional, affinity = routing.conditional, routing.affinity
    path = ("proxy", "routing", "conditional")
    if conditional is not None:
        if conditional.min_prompt_tokens is None and conditional.max_missing_tokens is None:
            yield Problem(path, "has no threshold, so no prompt skips prefill", "set min_prompt_tokens, or remove it")
        if conditional.max_missing_tokens is not None and policy_of(recipe, "decode") not in _KNOWS_PREFIXES:
            yield Problem(
                (*path, "max_missing_tokens"),
                f"{policy_of(recipe, 'decode')} does not know what a decode holds, so this never applies",
                "set proxy.routing.decode: {kind: prefix_aware}",
                also=(("proxy", "routing", "decode"),),
            )
    if affinity is not None and affinity.header is None and not affinity.body_user:
        yield Problem(
            ("proxy", "routing", "affinity"), "nothing names a session", "set header, or body_user: true"
        )  # fmt: skip


def kv_event_policies(recipe: Recipe) -> Iterator[Problem]:
    """Refuse a policy that listens to engines which publish nothing."""
    flag = "enable-prefix-caching"
    for name, role, _ in roles(recipe):
        if policy_of(recipe, name) != "kv_events":
            continue
        here = ("proxy", "routing", name, "kind")
        if args_of(recipe, role).get(flag) is False:
            what = "there is no cache that an engine could publish events about"
            yield Problem(flag_path(recipe, name, flag), what, "remove the flag, or the policy", also=(here,))
        if role.parallel.dp > 1 and role.parallel.processes > 1:
            where = "on the nodes they run on" if role.parallel.nodes > 1 else "in processes of their own"
            yield Problem(
                here,
                f"the ranks of a {name} publish {where}, and the proxy listens at the first one only",
                "use prefix_aware",
                also=((name, "parallel"),),
            )


def proxy_times(recipe: Recipe) -> Iterator[Problem]:
    """Refuse a time within a shorter one."""
    proxy = recipe.proxy
    if proxy.health.timeout_seconds > proxy.health.interval_seconds:
        yield Problem(
            ("proxy", "health", "timeout_seconds"),
            f"a check may take {proxy.health.timeout_seconds:g} s and the next one is due after "
            f"{proxy.health.interval_seconds:g} s",
            "lower it, or raise interval_seconds",
            also=(("proxy", "health", "interval_seconds"),),
        )
    if "hold_seconds" in proxy.model_fields_set and proxy.on_empty_pool != "wait":
        yield Problem(
            ("proxy", "hold_seconds"),
            f"on_empty_pool is {proxy.on_empty_pool}, so no request waits for an engine",
            "remove it, or write on_empty_pool: wait",
            also=(("proxy", "on_empty_pool"),),
        )
    for name, _ in recipe.roles() if proxy.kind == "pdserve" else ():
        limits = getattr(proxy.admission, name)
        if limits.queue_seconds >= proxy.request_timeout_seconds:
            yield Problem(
                ("proxy", "admission", name, "queue_seconds"),
                f"a request that waits for {limits.queue_seconds:g} s has no time left of "
                f"{proxy.request_timeout_seconds:g} s",
                "lower it, or raise proxy.request_timeout_seconds",
                also=(("proxy", "request_timeout_seconds"),),
            )


def admin_access(recipe: Recipe) -> Iterator[Problem]:
    """Refuse admin endpoints without a place, with two, or open to every client."""
    settings = recipe.proxy.admin
    if settings is None:
        return
    path = ("proxy", "admin")
    if (settings.port is None) == (settings.socket is None):
        what = "neither port nor socket is set" if settings.port is None else "both port and socket are set"
        yield Problem(path, what, "set one of them; a socket is reachable for this user only")
    if settings.socket is not None and "host" in settings.model_fields_set:
        yield Problem((*path, "host"), "a socket has no address", "remove it", also=((*path, "socket"),))
    if settings.port is not None and settings.host not in _LOOPBACK and settings.token_file is None:
        yield Problem(
            (*path, "host"),
            f"anybody who reaches {settings.host} could add and remove workers",
            "set token_file, or keep 127.0.0.1",
        )


def upstream_tls(recipe: Recipe) -> Iterator[Problem]:
    """Refuse TLS that no connection would use, or half of a certificate."""
    settings = recipe.proxy.upstream_tls
    if settings is None:
        return
    path = ("proxy", "upstream_tls")
    if recipe.proxy.kind == "pdserve" and recipe.proxy.admin is None:
        yield Problem(
            path,
            "only workers that are added while serving can have a URL of https, and without proxy.admin there are none",
            "set proxy.admin, or remove it",
        )
    if (settings.certificate is None) != (settings.key is None):
        lacking = "key" if settings.key is None else "certificate"
        yield Problem(path, f"our own certificate needs its {lacking} too", f"set {lacking}, or remove the other one")


def proxy_exposure(recipe: Recipe) -> Iterator[Problem]:
    """Warn of what others can read, use or change through pdserve's proxy."""
    proxy = recipe.proxy
    if proxy.kind != "pdserve":
        return
    if proxy.host not in _LOOPBACK:
        if proxy.auth.keys_file is None:
            yield Problem(
                ("proxy", "host"),
                f"anybody who reaches {proxy.host} can use the model: the proxy asks for no key",
                "keep 127.0.0.1, or set proxy.auth.keys_file",
            )
        elif proxy.tls is None:
            yield Problem(
                ("proxy", "host"),
                f"keys and prompts travel to {proxy.host} in the clear",
                "set proxy.tls, or put a gateway that speaks TLS in front",
            )
    if proxy.cors is not None and "*" in proxy.cors.origins and proxy.auth.keys_file is None:
        yield Problem(
            ("proxy", "cors", "origins"),
            "any web page that a user of the proxy's network opens can use the model and read its answers",
            "name the origins, or set proxy.auth.keys_file",
        )
    settings = proxy.admin
    if settings is not None and settings.port is not None and settings.token_file is None:
        yield Problem(
            ("proxy", "admin", "port"),
            "every user of this machine can add and remove workers",
            "set token_file, or use socket",
        )
    if proxy.auth.client_authorization != "replace":
        yield Problem(
            ("proxy", "auth", "client_authorization"),
            "the engines of a deployment take only its own key, which is made at each start",
            "write replace, unless engine.command starts engines that ask for no key or for the client's",
        )


_KIND: Path = ("proxy", "kind")
_OURS = "remove it, or write proxy.kind: pdserve"


def router_mode(recipe: Recipe) -> Iterator[Problem]:
    """Refuse vllm-router in mode aggregated: it passes on the client's Authorization and has no key of its own
    (measured; --api-key changes nothing), and clients have none that engines take."""
    if recipe.proxy.kind == VLLM_ROUTER and recipe.mode == "aggregated":
        yield Problem(
            _KIND,
            "in mode aggregated vllm-router sends engines no key, and the engines of a deployment ask for one",
            "write kind: pdserve",
            also=(("mode",),),
        )


def router_settings(recipe: Recipe) -> Iterator[Problem]:
    """Refuse keys that only pdserve's own proxy reads, and values that the router cannot take."""
    proxy = recipe.proxy
    if proxy.kind != VLLM_ROUTER:
        return
    for key in sorted(proxy.model_fields_set - ROUTER_SETTINGS):
        yield Problem(("proxy", key), "vllm-router has no such setting", _OURS, also=(_KIND,))
    for key in sorted(proxy.routing.model_fields_set - {*ENGINE_ROLES}):
        yield Problem(("proxy", "routing", key), "vllm-router has no such setting", _OURS, also=(_KIND,))
    yield from _policies(recipe)
    times = {
        ("request_timeout_seconds",): proxy.request_timeout_seconds,
        ("health", "interval_seconds"): proxy.health.interval_seconds,
        ("health", "timeout_seconds"): proxy.health.timeout_seconds,
    }
    for path, seconds in times.items():
        if not float(seconds).is_integer():
            yield Problem(("proxy", *path), f"vllm-router takes whole seconds, not {seconds:g}", also=(_KIND,))


def router_exposure(recipe: Recipe) -> Iterator[Problem]:
    """Warn of what others can use and change through vllm-router."""
    proxy = recipe.proxy
    if proxy.kind == VLLM_ROUTER and proxy.host not in ("127.0.0.1", "localhost", "::1"):
        yield Problem(
            ("proxy", "host"),
            f"anybody who reaches {proxy.host} can use the model and remove workers: vllm-router asks for no key",
            "keep 127.0.0.1, and put a gateway in front that checks keys and passes on /v1 only",
            also=(_KIND,),
        )


def _policies(recipe: Recipe) -> Iterator[Problem]:
    routing = recipe.proxy.routing
    for pool, policy in (("prefill", routing.prefill), ("decode", routing.decode)):
        if pool not in routing.model_fields_set:
            continue
        path: Path = ("proxy", "routing", pool)
        if policy.kind not in ROUTER_POLICIES:
            yield Problem(
                (*path, "kind"),
                f"vllm-router has no policy like {policy.kind}",
                f"it has {', '.join(sorted(ROUTER_POLICIES))}",
                also=(_KIND,),
            )
            continue
        for knob in sorted(policy.model_fields_set - {"kind"}):
            yield Problem((*path, knob), "vllm-router has no such setting", _OURS, also=(_KIND,))


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
    """The ports of one kind that the processes of a role take: one block each."""

    role: str
    count: int
    size: int


def port_clashes(recipe: Recipe) -> Iterator[Problem]:
    """Refuse two kinds of port whose ranges meet, and ranges that leave the port space."""
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
                    f"port {port} is needed twice: by {a.what} ({_range_text(a)}) and by {b.what} ({_range_text(b)})",
                    "move one of them",
                    also=(b.at,),
                    write=_free_place(a, ranges),
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
    if recipe.proxy.kind == VLLM_ROUTER:
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
                yield _range_of(port, ports, [blocks])
            else:
                shared.setdefault(port.key, []).append((port, blocks))
        if publishes_kv_events(recipe, name):
            events.append(_Blocks(name, role.instances, role.parallel.dp * 2))
    for some in shared.values():
        yield _range_of(some[0][0], ports, [blocks for _, blocks in some])
    if events:
        yield _Range("kv_events", ports.kv_events, _in_turn(events), f"KV events x{_port_count(events)}")
    if recipe.mooncake_store is not None:
        yield _Range("mooncake_master", ports.mooncake_master, 1, "the master of the Mooncake store")
        yield _Range("mooncake_master_http", ports.mooncake_master_http, 1, "that master's HTTP side")
    if recipe.lmcache is not None:
        servers = 1
        if recipe.lmcache.per == "tp-rank":
            servers = max((role.parallel.tp for name, role, _ in roles(recipe) if name in recipe.lmcache.on), default=1)
        yield _Range("lmcache", ports.lmcache, servers, f"LMCache x{servers}")
        yield _Range("lmcache_http", ports.lmcache_http, servers, f"LMCache HTTP x{servers}")


def _range_of(port: ConnectorPort, ports: Ports, some: Sequence[_Blocks]) -> _Range:
    what = f"{port.what} x{_port_count(some) // port.count}"
    return _Range(port.key, getattr(ports, port.key), _in_turn(some), what, roles=tuple(each.role for each in some))


def _port_count(some: Sequence[_Blocks]) -> int:
    return sum(each.count * each.size for each in some)


def _in_turn(some: Sequence[_Blocks]) -> int:
    """Return the ports from the first to the last, where the roles take blocks of the largest size in turn
    (plan/ports.py)."""
    size = max(each.size for each in some)
    return max(((each.count - 1) * len(some) + turn) * size + each.size for turn, each in enumerate(some))


def _free_place(moved: _Range, ranges: list[_Range]) -> Line | None:
    """Return the nearest place above for a range that meets another one."""
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


def _range_text(r: _Range) -> str:
    return str(r.first) if r.count == 1 else f"{r.first} to {r.last}"
