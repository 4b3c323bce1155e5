"""Keys that people write where the format has none: other tools' names, and keys of another section."""

from __future__ import annotations

from pdserve.recipe.load.problems import Path
from pdserve.recipe.model import Ports
from pdserve.roles import ENGINE_ROLES

_PORT_WORDS = ("port", "ports", "http_port")
_NAMES = {
    # at the top
    "port": "ports.proxy",
    "host": "proxy.host",
    "replicas": "prefill.instances",
    "instances": "prefill.instances",
    "routing": "proxy.routing",
    "admin": "proxy.admin",
    "tls": "proxy.tls",
    "auth": "proxy.auth",
    "nodes": "slurm.nodes",
    "partition": "slurm.partition",
    "time": "slurm.time",
    "gpus_per_node": "devices_per_node",
    "num_gpus": "devices_per_node",
    "gpus": "devices_per_node",
    "backend": "platform",
    "device": "platform",
    "model_path": "model.path",
    "model_id": "model.id",
    "served_model_name": "model.served_name",
    "served_name": "model.served_name",
    # of the proxy
    "proxy.address": "proxy.host",
    "proxy.bind": "proxy.host",
    "proxy.listen": "proxy.host",
    "proxy.policy": "proxy.routing.prefill.kind",
    "proxy.api_key": "proxy.auth.keys_file",
    "proxy.keys_file": "proxy.auth.keys_file",
    "proxy.timeout": "proxy.request_timeout_seconds",
    "proxy.replicas": "proxy.workers",
    # of LMCache
    "lmcache.size": "lmcache.l1_size_gb",
    "lmcache.size_gb": "lmcache.l1_size_gb",
    "lmcache.max_local_cpu_size": "lmcache.l1_size_gb",
    "lmcache.host_memory_gb": "lmcache.l1_size_gb",
    "lmcache.args": "lmcache.extra_args",
    "lmcache.roles": "lmcache.on",
    # of the model
    "model.name": "model.served_name",
    "model.repo": "model.id",
    "model.repo_id": "model.id",
    "model.hf_id": "model.id",
    "model.served_model_name": "model.served_name",
    "model.dir": "model.path",
}
_OF_ROLES = {
    "replicas": "instances",
    "count": "instances",
    "num_instances": "instances",
    "workers": "instances",
    "gpus": "devices",
    "device_ids": "devices",
    "kv_connector": "connector",
    "flags": "args",
    "vllm_args": "args",
    "extra_args": "args",
    "environment": "env",
}


def place(path: Path) -> str | None:
    """The key that a key at `path` usually means, as a path from the top of the recipe."""
    key, parent = str(path[-1]), ".".join(str(part) for part in path[:-1])
    if parent in ENGINE_ROLES:
        if key in _PORT_WORDS:
            return f"ports.{parent}"
        return f"{parent}.{_OF_ROLES[key]}" if key in _OF_ROLES else None
    if key in _PORT_WORDS and parent in Ports.model_fields:
        return f"ports.{parent}"
    if key == "http_port" and parent == "lmcache":
        return "ports.lmcache_http"
    return _NAMES.get(f"{parent}.{key}" if parent else key)
