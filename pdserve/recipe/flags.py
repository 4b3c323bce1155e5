"""Flags and environment variables that pdserve sets itself, and what to write instead of them."""

from __future__ import annotations

from pdserve.recipe.vllm_flags import FLAGS

_PARALLEL = "<role>.parallel"
OWNED: dict[str, str] = {
    "model": "set model.path or model.id",
    "model-tag": "set model.path or model.id",
    "revision": "set model.revision",
    "served-model-name": "set model.served_name",
    "config": "write the flags of that file under args",
    "host": "engines listen on their node's address; clients talk to the proxy (proxy.host)",
    "port": "set ports.<role>",
    "uds": "set ports.<role>",
    "grpc": "the proxy speaks HTTP to engines",
    "grpc-port": "the proxy speaks HTTP to engines",
    "root-path": "the proxy needs the engines' paths as they are",
    "api-key": "every deployment makes its own key for its engines",
    "kv-transfer-config": "set <role>.connector (kind: raw takes a whole mapping)",
    "kv-offloading-backend": "set <role>.connector and the lmcache section",
    "kv-offloading-size": "set <role>.connector and the lmcache section",
    "tensor-parallel-size": f"set {_PARALLEL}.tp",
    "tp": f"set {_PARALLEL}.tp",
    "pipeline-parallel-size": f"set {_PARALLEL}.pp",
    "pp": f"set {_PARALLEL}.pp",
    "data-parallel-size": f"set {_PARALLEL}.dp",
    "dp": f"set {_PARALLEL}.dp",
    "enable-expert-parallel": f"set {_PARALLEL}.ep",
    "ep": f"set {_PARALLEL}.ep",
    "headless": f"set {_PARALLEL}.nodes",
    "nnodes": f"set {_PARALLEL}.nodes",
    "node-rank": f"set {_PARALLEL}.nodes",
    "master-addr": f"set {_PARALLEL}.nodes",
    "master-port": "set ports.dp_master",
    "device-ids": "set <role>.devices",
    "api-server-count": "the proxy and `status` know one API server for each instance",
}
"""Flag -> what to do instead. Every `data-parallel-*` flag belongs to the list as well."""

_OWNED_ENV: dict[str, str] = {
    "VLLM_HOST_IP": "it is the address of the engine's node",
    "VLLM_PORT": "set ports.<role>",
    "VLLM_API_KEY": "every deployment makes its own key for its engines",
    "VLLM_MOONCAKE_BOOTSTRAP_PORT": "set ports.bootstrap",
    "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "set timeouts.transfer_abort_seconds",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "it is the address of the engine's node",
    "VLLM_NIXL_SIDE_CHANNEL_PORT": "set ports.nixl",
    "VLLM_SERVER_DEV_MODE": "set engine.cache_reset_endpoint",
    "VLLM_DP_MASTER_IP": f"set {_PARALLEL}.nodes",
    "VLLM_DP_MASTER_PORT": "set ports.dp_master",
    "VLLM_DP_RANK": f"set {_PARALLEL}.dp",
    "VLLM_DP_SIZE": f"set {_PARALLEL}.dp",
    "PYTHONHASHSEED": "set engine.hash_seed (engines and LMCache must agree)",
    "CUDA_VISIBLE_DEVICES": "set <role>.devices",
    "HIP_VISIBLE_DEVICES": "set <role>.devices",
    "ROCR_VISIBLE_DEVICES": "set <role>.devices",
    "GPU_DEVICE_ORDINAL": "set <role>.devices",
    "LMCACHE_MP_TRANSFER_MODE": "set transfer_mode of the lmcache-mp connector",
}


def known_flags() -> frozenset[str]:
    """Flags that vLLM is known to have."""
    return FLAGS


def where_instead(flag: str, role: str) -> str | None:
    """What to write instead of `flag`, if pdserve sets it."""
    text = OWNED.get(flag.split(".")[0])
    if text is None and flag.startswith("data-parallel-"):
        text = f"set {_PARALLEL}.dp and {_PARALLEL}.nodes"
    return text.replace("<role>", "prefill" if role == "engine" else role) if text else None


def env_instead(variable: str, role: str) -> str | None:
    """What to do instead of setting `variable`, if pdserve sets it."""
    text = _OWNED_ENV.get(variable)
    if text is None and variable.startswith("PDSERVE_"):
        text = "PDSERVE_ variables are how pdserve talks to its own processes"
    return text.replace("<role>", "prefill" if role == "engine" else role) if text else None
