"""vLLM's --kv-transfer-config of another tool -> the connector of a recipe.

A mapping that a section can make again becomes that section. Any other one is carried over whole, as `kind: raw`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.recipe.connectors.registry import MULTI_CLASS
from pdserve.recipe.load import show
from pdserve.recipe.load.problems import Path

Config = Mapping[str, Any]
_GIB = 1 << 30
_AT_THE_TOP = "vLLM reads it at the top level only"
_MADE_BY_PDSERVE = {
    "engine_id": "vLLM makes one for each engine, and two engines must not share it",
    "kv_role": "pdserve names the side of each role",
}
_STORE_ALWAYS = {"load_async": True, "lookup_async": True}
"""What MooncakeStoreSection writes."""
_HOST_BYTES = "cpu_bytes_to_use"
_LARGEST = 1 << 60
"""Bytes. Beyond it a number is a slip."""
_OFFLOADING = {
    _HOST_BYTES: "cpu_gib",
    "blocks_per_chunk": "blocks_per_chunk",
    "eviction_policy": "eviction",
    "store_threshold": "store_threshold",
    "offload_prompt_only": "prompts_only",
}
"""vLLM's words -> keys of the section, whose defaults are vLLM's."""
_COUNTS = ("blocks_per_chunk", "store_threshold")
_SERVER_TIMEOUTS = {"lmcache.mp.mq_timeout": "mq_timeout_seconds", "lmcache.mp.heartbeat_interval": "heartbeat_seconds"}
"""Of LMCache's clients -> keys of the lmcache section."""
_WITHOUT_MEANING = {"enable_offload": False, "enable_cross_layers_blocks": False}
"""Their value is vLLM's default."""
_MORIIO_KEPT = ("backend", "qp_per_transfer", "post_batch_size", "num_workers")
_MORIIO_PLACES = ("proxy_ip", "proxy_ping_port", "http_port", "handshake_port", "notify_port", "host_ip")
_MORIIO_LEFT = {
    **dict.fromkeys(_MORIIO_PLACES, "the plan gives each engine its address and ports, and no proxy is pinged"),
    **dict.fromkeys(
        ("transfer_timeout", "defer_timeout", "recv_abort_timeout"),
        "the section makes it from proxy.request_timeout_seconds",
    ),
    "read_mode": "decode always reads: pdserve's proxy speaks no WRITE mode",
}


@dataclass(frozen=True)
class CarriedConnector:
    """The connector of one role."""

    section: dict[str, Any]
    """As a recipe has it."""
    load_failure: str | None
    """The role's kv_load_failure_policy; None in a raw mapping, which has its own."""
    replaced: tuple[tuple[str, str], ...]
    """Keys that were left to pdserve or vLLM, and why."""
    refused: tuple[tuple[str, str], ...] = ()
    """Keys of a raw mapping that vLLM does not take as they are, and why."""


def section_of(config: Config, *, raw: bool = False) -> CarriedConnector:
    """Carry `config` over as a section, or raw where no section can make it, or where the other role's is raw."""
    section = None if raw else _section(config)
    if section is None:
        mapping, replaced = _raw(config)
        return CarriedConnector({"kind": "raw", "config": mapping}, None, replaced, tuple(_refused(mapping)))
    replaced = tuple((key, why) for key, why in _MADE_BY_PDSERVE.items() if _has(config, key))
    replaced += tuple(dict(_left_out(config)).items())
    return CarriedConnector(section, config.get("kv_load_failure_policy"), replaced)


def needs_raw(config: Config) -> bool:
    """Return whether no section can make the mapping."""
    return _section(config) is None


def classes(config: Config) -> set[str]:
    """Return vLLM's class names in the mapping."""
    return {str(config.get("kv_connector")), *(name for child in _children(config) for name in classes(child))}


def without_timeouts(config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the mapping without the timeouts of LMCache's clients, and those as keys of the lmcache section."""
    mapping = copy.deepcopy(dict(config))
    found: dict[str, Any] = {}
    for each in (mapping, *_children(mapping)):
        extra = _extra(each)
        found.update({_SERVER_TIMEOUTS[key]: extra.pop(key) for key in _SERVER_TIMEOUTS if key in extra})
    return mapping, found


def _section(config: Config) -> dict[str, Any] | None:
    if config.get("kv_connector") == MULTI_CLASS:
        if _extra(config).keys() - {"connectors"} or _others(config):
            return None
        children = [_leaf(child) for child in _children(config)]
        if len(children) < 2 or any(child is None for child in children):
            return None
        return {"kind": "multi", "of": children}
    return _leaf(config)


def _others(config: Config) -> set[str]:
    """Return the keys that no section knows."""
    known = {"kv_connector", "kv_role", "engine_id", "kv_connector_extra_config", "kv_load_failure_policy"}
    return set(config) - known


def _leaf(config: Config) -> dict[str, Any] | None:
    extra = {key: value for key, value in _extra(config).items() if (key, value) not in _WITHOUT_MEANING.items()}
    others = _others(config)
    match config.get("kv_connector"):
        case "NixlConnector" | "NixlPullConnector":
            if others - {"kv_buffer_device"} or extra.keys() - {"backends", "kv_lease_duration"}:
                return None
            return _filled(
                "nixl",
                buffer_device=config.get("kv_buffer_device"),
                backends=extra.get("backends"),
                lease_seconds=extra.get("kv_lease_duration"),
            )
        case "MooncakeConnector":
            if others or extra.keys() - {"mooncake_protocol", "num_workers", "device_name"}:
                return None
            return _filled(
                "mooncake",
                protocol=extra.get("mooncake_protocol"),
                num_workers=extra.get("num_workers"),
                device_name=extra.get("device_name") or None,
            )
        case "MooncakeStoreConnector":
            same = all(extra.get(key, value) == value for key, value in _STORE_ALWAYS.items())
            unknown = extra.keys() - _STORE_ALWAYS.keys() - {"save_decode_cache", "cache_prefix"}
            if others or unknown or not same:
                return None
            return _filled(
                "mooncake-store",
                save_decode_cache=extra.get("save_decode_cache"),
                cache_prefix=extra.get("cache_prefix") or None,
            )
        case "OffloadingConnector":
            if others or extra.keys() - _OFFLOADING.keys() or _HOST_BYTES not in extra:
                return None
            if (size := _size(extra[_HOST_BYTES])) is None:
                return None
            kept = {_OFFLOADING[key]: _number(value) if key in _COUNTS else value for key, value in extra.items()}
            return _filled("offloading", **{**kept, "cpu_gib": size / _GIB})
        case "MoRIIOConnector":
            if others or extra.keys() - {*_MORIIO_KEPT, *_MORIIO_LEFT}:
                return None
            # Launches write its numbers as text.
            kept = {key: _number(extra[key]) for key in _MORIIO_KEPT if key in extra}
            return _filled("moriio", **kept)
        case "LMCacheMPConnector":
            if others - {"kv_connector_module_path"} or extra.keys() - {"lmcache.mp.host", "lmcache.mp.port"}:
                return None
            return {"kind": "lmcache-mp"}
    return None


def _left_out(config: Config) -> Iterator[tuple[str, str]]:
    """Yield settings of the mapping that its section does not repeat, and why."""
    name, extra = config.get("kv_connector"), _extra(config)
    for key, value in extra.items():
        if (key, value) in _WITHOUT_MEANING.items():
            yield str(key), "it is vLLM's default"
        elif str(key).startswith("lmcache.mp."):
            yield str(key), "the engines of a recipe find the LMCache server of their node (section lmcache)"
    if name == "MoRIIOConnector":
        yield from ((key, why) for key, why in _MORIIO_LEFT.items() if key in extra or key == "read_mode")
    if name == "MooncakeStoreConnector":
        yield from ((key, "the section always has it: true") for key in _STORE_ALWAYS if key not in extra)
    for child in _children(config):
        if "kv_load_failure_policy" in child:
            yield f"{child.get('kv_connector')}.kv_load_failure_policy", _AT_THE_TOP
        yield from _left_out(child)


def _refused(config: Config) -> Iterator[tuple[str, str]]:
    extra = _extra(config)
    if _HOST_BYTES in extra and _size(extra[_HOST_BYTES]) is None:
        why = f"{show.value(extra[_HOST_BYTES])} is no number of bytes, and vLLM would not start: correct it"
        yield f"{config.get('kv_connector')}.{_HOST_BYTES}", why
    for child in _children(config):
        yield from _refused(child)


def acceptances(section: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the keys of a role's connector that only its user may write: what it can do to KV is to be accepted by
    name."""
    if section.get("kind") == "moriio":
        yield ("accept_unsafe_aborts",)
    for index, child in enumerate(section.get("of", ())):
        yield from (("of", index, *key) for key in acceptances(child))


def with_acceptances(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the connector with all of that written: the rest is valid with it or without."""
    result = copy.deepcopy(dict(section))
    for *above, key in acceptances(section):
        there: Any = result
        for part in above:
            there = there[part]
        there[key] = True
    return result


def _size(value: Any) -> int | None:
    """Read a number as vLLM's int() does, from a text too (vllm/v1/kv_offload/cpu/spec.py); None where that fails."""
    try:
        number = int(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else None
    except (ValueError, OverflowError):
        return None
    return number if number is not None and abs(number) <= _LARGEST else None


def _number(value: Any) -> Any:
    number = _size(value) if isinstance(value, str) else None
    return value if number is None else number


def _filled(kind: str, **settings: Any) -> dict[str, Any]:
    return {"kind": kind, **{key: value for key, value in settings.items() if value is not None}}


def _raw(config: Config) -> tuple[dict[str, Any], tuple[tuple[str, str], ...]]:
    """Return the mapping without what vLLM ignores or refuses in a child, and what was left out."""
    mapping = copy.deepcopy(dict(config))
    replaced: list[tuple[str, str]] = []
    if mapping.pop("engine_id", None) is not None:
        replaced.append(("engine_id", _MADE_BY_PDSERVE["engine_id"]))
    for child in _children(mapping):
        for key in ("kv_load_failure_policy", "engine_id"):
            if child.pop(key, None) is not None:
                replaced.append((f"{child.get('kv_connector')}.{key}", _AT_THE_TOP))
    return mapping, tuple(replaced)


def _has(config: Config, key: str) -> bool:
    return key in config or any(_has(child, key) for child in _children(config))


def _extra(config: Config) -> dict[str, Any]:
    extra = config.get("kv_connector_extra_config")
    return extra if isinstance(extra, dict) else {}


def _children(config: Config) -> list[dict[str, Any]]:
    children = _extra(config).get("connectors")
    return [child for child in children if isinstance(child, dict)] if isinstance(children, list) else []
