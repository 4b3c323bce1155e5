"""A recipe of srt-slurm in schema 1, spelled as schema 2 has it, by the table that srt-slurm publishes
(docs/legacy-v1.md of its 2.0). It serves the same."""

from __future__ import annotations

from typing import Any

_ROLES = {"prefill": "prefill", "decode": "decode", "agg": "aggregated"}


def respelled(data: dict[str, Any]) -> dict[str, Any]:
    """The document, changed in place; of a file with variants each of them."""
    if "base" in data:
        for key, value in data.items():
            if isinstance(value, dict) and (key == "base" or key.startswith(("override_", "zip_override_"))):
                _respell(value, data["base"])
        return {"schema": 2, **data}
    _respell(data, data)
    return {"schema": 2, **data}


def _respell(data: dict[str, Any], base: dict[str, Any]) -> None:
    roles: dict[str, dict[str, Any]] = {}
    resources, backend = data.get("resources") or {}, data.pop("backend", None) or {}
    configs = backend.pop("vllm_config", None) or {}
    events = backend.pop("kv_events_config", None)
    for role, mode in _ROLES.items():
        spec: dict[str, Any] = {}
        for old, new in ((f"{role}_nodes", "nodes"), (f"{role}_workers", "workers"), (f"gpus_per_{role}", "gpus")):
            if old in resources:
                spec[new] = resources.pop(old)
        if spec.get("nodes") == 0:
            spec["nodes"] = "colocate"
        if f"{mode}_environment" in backend:
            spec["env"] = backend.pop(f"{mode}_environment")
        if mode in configs:
            spec["args"] = configs[mode]
        if isinstance(events, dict) and mode in events:
            spec["kv_events"] = events[mode]
        if spec:
            roles[role] = spec
    if roles:
        data["roles"] = roles
    _services(data, backend, roles)
    if backend:
        data["engine"] = backend
    elif data is base:
        data["engine"] = "vllm"
    dynamo = data.get("dynamo")
    if isinstance(dynamo, dict):
        source = {new: dynamo.pop(old) for old, new in (("version", "pypi"), ("wheel", "wheel")) if old in dynamo}
        if source:
            dynamo["source"] = source


def _services(data: dict[str, Any], backend: dict[str, Any], roles: dict[str, dict[str, Any]]) -> None:
    services: list[dict[str, Any]] = []
    if isinstance(infra := data.pop("infra", None), dict) and infra:
        services += [{"name": name, "type": name} for name in ("etcd", "nats")]
    if isinstance(store := backend.pop("mooncake_kv_store", None), dict):
        entry: dict[str, Any] = {"name": "mooncake-master", "type": "mooncake-master"}
        if "store_config" in store:
            entry["options"] = {"store_config": store["store_config"]}
        if "master_extra_args" in store:
            entry["args"] = store["master_extra_args"]
        for spec in roles.values():
            if store.get("env"):
                spec["env"] = {**spec.get("env", {}), **store["env"]}
        services.append(entry)
    if services:
        data["services"] = services
