"""Every key of a recipe's `proxy:` section, set to what is not its default, is found where it is used.

The keys are those of the models, so that a new one is asked for here: it fails until `USED` says where it is used.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import httpx
from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pdserve.pd.config.proxy import ProxyConfig
from pdserve.pd.http.front import Front
from pdserve.pd.processes import shared_numbers
from pdserve.pd.serve import server
from pdserve.pd.serve.gateway import Gateway
from pdserve.pd.workers.engines import PASSED_ON
from pdserve.plan.model import Plan
from pdserve.proxy import ListenSettings, listening
from pdserve.recipe.model import Proxy
from tests.launch.deployment import free_ports
from tests.plan.kit import aggregated, plan, recipe
from tests.proxy.test_tls import made
from tests.tables import each_row

POOLS = ("prefill", "decode", "aggregated")


@dataclass
class Running:
    """What a recipe becomes."""

    plan: Plan
    config: ProxyConfig
    gateway: Gateway
    front: Front

    @property
    def worker(self) -> Any:
        return next(iter(self.gateway.registry.workers.values()))

    @property
    def admin(self) -> Any:
        return self.gateway._admin

    def policy(self, pool: str) -> Any:
        return self.gateway.pools.policies[pool]  # type: ignore[index]

    def process(self) -> Any:
        return self.plan.process("proxy")


Where = Callable[[Running], Any]


def _pool(pool: str) -> Mapping[str, Where]:
    routing, limits = f"routing.{pool}", f"admission.{pool}"
    feed: Where = lambda r: r.gateway._feeds._subscribers[pool]._timeout_ms / 1000  # noqa: E731
    return {
        f"{routing}.kind": lambda r: r.policy(pool).name,
        f"{routing}(prefix_aware).block_bytes": lambda r: r.policy(pool)._block_bytes,
        f"{routing}(prefix_aware).max_blocks": lambda r: r.policy(pool)._max_blocks,
        f"{routing}(prefix_aware).min_match_ratio": lambda r: r.policy(pool)._min_match_ratio,
        f"{routing}(kv_events).max_blocks": lambda r: r.policy(pool).index._max_blocks,
        f"{routing}(kv_events).min_match_ratio": lambda r: r.policy(pool)._min_match_ratio,
        f"{routing}(kv_events).replay_timeout_seconds": feed,
        **{f"{limits}.{name}": _limit(pool, name) for name in _names(Proxy, "admission", "prefill")},
    }


def _names(model: type[BaseModel], *path: str) -> list[str]:
    for part in path:
        model = next(_models(model.model_fields[part].annotation))
    return list(model.model_fields)


def _limit(pool: str, name: str) -> Where:
    return lambda r: getattr(r.gateway._entrance.gates[pool]._limits, name)  # type: ignore[index]


def _burden(name: str) -> Where:
    return lambda r: getattr(r.policy("decode")._burden, name)


def _restart(name: str) -> Where:
    return lambda r: getattr(r.process().restart, name)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _models(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for option in get_args(annotation):
            yield from _models(option)
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation


def _asks_for_a_token(r: Running) -> Any:
    """Tell whether the admin turns away who shows none."""

    async def ask() -> int:
        transport = httpx.ASGITransport(app=r.admin._answers._app)
        async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
            return (await client.get("/workers")).status_code

    return ask()


def _bound(r: Running) -> str:
    (sock,) = listening(ListenSettings(r.config.host, 0, 1, b""))
    with sock:
        return str(sock.getsockname()[0])


USED: Mapping[str, Where] = {
    "host": _bound,
    "prewarm": lambda r: r.gateway._prewarm is not None,
    "request_timeout_seconds": lambda r: r.gateway.config.request_timeout_seconds,
    "connect_timeout_seconds": lambda r: r.worker.pool._connect_timeout,
    "on_empty_pool": lambda r: r.gateway._dispatcher._config.on_empty_pool,
    "hold_seconds": lambda r: r.gateway._hold._seconds,
    "drain_seconds": lambda r: r.config.drain_seconds,
    "max_body_bytes": lambda r: r.front.limits.max_body_bytes,
    **{key: where for pool in POOLS for key, where in _pool(pool).items()},
    **{f"routing.load.{name}": _burden(f"_{name}") for name in _names(Proxy, "routing", "load")},
    "routing.affinity.header": lambda r: r.gateway._parser._affinity.header,  # type: ignore[union-attr]
    "routing.affinity.body_user": lambda r: r.gateway._parser._affinity.body_user,  # type: ignore[union-attr]
    "routing.conditional.min_prompt_tokens": lambda r: r.gateway.pools._thresholds.min_prompt_tokens,  # type: ignore[union-attr]
    "routing.conditional.max_missing_tokens": lambda r: r.gateway.pools._thresholds.max_missing_tokens,  # type: ignore[union-attr]
    "admission.priority_header": lambda r: r.gateway._parser._priority_header.decode(),
    "breaker.failures": lambda r: r.worker.judgement._limit,
    "breaker.open_seconds": lambda r: r.worker.judgement._open_seconds,
    "health.interval_seconds": lambda r: r.gateway._health._settings.interval_seconds,
    "health.timeout_seconds": lambda r: r.gateway._health._settings.timeout_seconds,
    "health.failures": lambda r: r.gateway._health._settings.failures,
    "allowed_hosts": lambda r: sorted(r.gateway._intake._hosts._names - {r.config.host}),  # type: ignore[union-attr]
    "cors.origins": lambda r: sorted(origin.decode() for origin in r.gateway.cors._origins),  # type: ignore[union-attr]
    "cors.credentials": lambda r: r.gateway.cors._credentials,  # type: ignore[union-attr]
    "forward_headers": lambda r: sorted(name.decode() for name in r.gateway.engines._passed_on - PASSED_ON),
    "auth.keys_file": lambda r: r.gateway.keys and "team" in r.gateway.keys.current.names,
    "auth.client_authorization": lambda r: r.gateway.engines._authorization,
    "tls.certificate": lambda r: r.config.tls and r.config.tls.certificate,
    "tls.key": lambda r: r.config.tls and r.config.tls.key,
    "upstream_tls.ca": lambda r: len(r.gateway.registry._tls.get_ca_certs()),  # type: ignore[union-attr]
    "upstream_tls.certificate": lambda r: r.config.upstream_tls and r.config.upstream_tls.certificate,
    "upstream_tls.key": lambda r: r.config.upstream_tls and r.config.upstream_tls.key,
    "upstream_tls.verify": lambda r: r.gateway.registry._tls.verify_mode is not ssl.CERT_NONE,  # type: ignore[union-attr]
    "admin.port": lambda r: r.admin._socket.getsockname()[1],
    "admin.host": lambda r: r.admin._socket.getsockname()[0],
    "admin.socket": lambda r: r.admin._socket.getsockname(),
    "admin.token_file": _asks_for_a_token,
    "log": lambda r: r.gateway.log._render.__name__.removeprefix("_"),
    "otel.endpoint": lambda r: r.gateway._spans._processor.span_exporter._endpoint,  # type: ignore[attr-defined]
    "otel.sample_ratio": lambda r: r.gateway._spans._sample_ratio,  # type: ignore[attr-defined]
    "kind": lambda r: "vllm-router" if "vllm_router" in str(r.process().argv) else r.process().argv,
    "workers": lambda r: r.config.processes,
    **{f"restart.{name}": _restart(name) for name in _names(Proxy, "restart")},
    "command": lambda r: list(r.process().argv[:1]),
}
"""Key -> what has its value in the running proxy, or in the plan of its process."""


def where(path: str) -> Where:
    section, _, name = path.partition(".")
    if section == "limits" and path not in USED:
        return lambda r: getattr(r.front.limits, name)
    assert path in USED, f"proxy.{path} is used nowhere that this test knows: say where in USED"
    return USED[path]


def keys(model: type[BaseModel] = Proxy, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key that holds a value, with the kind of a policy in parentheses."""
    for name, field in model.model_fields.items():
        inner = list(_models(field.annotation))
        policies = "kind" in inner[0].model_fields if inner else False
        if policies:
            yield f"{prefix}{name}.kind", field
        for inner_model in inner:
            kind = f"({inner_model.model_fields['kind'].default})" if policies else ""
            for path, below in keys(inner_model, f"{prefix}{name}{kind}."):
                if not (policies and path.endswith(").kind")):
                    yield path, below
        if not inner:
            yield f"{prefix}{name}", field


KEYS = dict(keys())


def other(path: str, field: FieldInfo, folder: Path) -> Any:
    """A value that is not the default."""
    pair = made(folder, "test")
    (folder / "keys").write_text(json.dumps({"name": "team", "sha256": "0" * 64}) + "\n")
    (folder / "token").write_text("an-admin-token-of-32-characters!")
    special = {
        "host": "127.0.0.2",
        "command": ["my-proxy"],
        "allowed_hosts": ["x-another"],
        "cors.origins": ["https://chat.example"],
        "forward_headers": ["baggage"],
        # More than the default may be more than there are open files.
        "limits.max_connections": 7,
        "auth.keys_file": str(folder / "keys"),
        "tls.certificate": str(pair.certificate),
        "tls.key": str(pair.key),
        "upstream_tls.ca": str(pair.certificate),
        "upstream_tls.certificate": str(pair.certificate),
        "upstream_tls.key": str(pair.key),
        "admin.port": 0,
        "admin.host": "127.0.0.3",
        "admin.socket": str(folder / "admin.sock"),
        "admin.token_file": str(folder / "token"),
        "otel.endpoint": "http://127.0.0.1:9/v1/traces",
    }
    if path.endswith(".kind"):
        return "power_of_two"
    if path in special:
        return special[path]
    scalar = next(scalar_type for scalar_type in _scalars(field.annotation) if scalar_type is not type(None))
    default = field.default
    if get_origin(scalar) is Literal:
        return next(choice for choice in get_args(scalar) if choice != default)
    if scalar is bool:
        return not default
    if scalar is int:
        return (default or 6) + 1
    if scalar is float:
        return (default or 0.5) / 2 if default != 1.5 else 2.5
    return "x-another"


def _scalars(annotation: Any) -> Iterator[Any]:
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _scalars(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for option in get_args(annotation):
            yield from _scalars(option)
    else:
        yield annotation


def section(path: str, value: Any, folder: Path) -> dict[str, Any]:
    """The `proxy:` section that sets the key, and what it cannot do without."""
    pair = made(folder, "test")
    files = {"certificate": str(pair.certificate), "key": str(pair.key)}
    needed: dict[str, dict[str, Any]] = {
        "tls": files,
        "upstream_tls": files,
        "admin": {} if path == "admin.socket" else {"port": free_ports(1)[0]},
        "otel": {"endpoint": "http://127.0.0.1:9/v1/traces"},
        "cors": {"origins": ["https://chat.example"]},
    }
    *parents, name = path.split(".")
    wanted: Any = {name: value}
    for part in reversed(parents):
        outer, _, kind = part.partition("(")
        if kind:
            wanted = {"kind": kind.removesuffix(")"), **wanted}
        wanted = {outer: wanted}
    for part, more in needed.items():
        if parents and parents[0] == part:
            wanted = {part: {**more, **wanted[part]}}
    return dict(wanted)


async def value_in_use(path: str, proxy: dict[str, Any]) -> Any:
    whole = aggregated() if ".aggregated" in path else {}
    made_plan = plan(recipe(whole, {"proxy": proxy}))
    # Over the wire, as the launcher hands it on.
    config = ProxyConfig.model_validate_json(made_plan.proxy.model_dump_json())
    numbers = shared_numbers.private(Gateway.numbers(config))
    gateway = Gateway(config, None, numbers, FastAPI())
    try:
        value = where(path)(Running(made_plan, config, gateway, Front(gateway, server.front_limits(config))))
        return await value if asyncio.iscoroutine(value) else value
    finally:
        await gateway._feeds.close()
        gateway._spans.close()
        if gateway._admin is not None:
            await gateway._admin.stop()


@each_row("path", [*KEYS])
def test_a_setting_is_found_where_it_is_used(path: str, tmp_path: Path) -> None:
    value = other(path, KEYS[path], tmp_path)
    if path == "admin.port":
        value = free_ports(1)[0]
    expected = {"auth.keys_file": True, "upstream_tls.ca": 1, "admin.token_file": 401}.get(path, value)
    assert value != KEYS[path].default
    assert asyncio.run(value_in_use(path, section(path, value, tmp_path))) == expected


def test_no_place_is_named_for_a_key_that_there_is_not() -> None:
    assert set(USED) <= set(KEYS)
