"""Flags and variables that pdserve sets itself, of engines and of LMCache servers: their values, and what a recipe
writes instead of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pdserve.recipe.connectors.registry import SECTIONS
from pdserve.recipe.effective import publishes_kv_events
from pdserve.recipe.load.problems import Path
from pdserve.recipe.model import LoadBalancing, Parallel, Recipe
from pdserve.recipe.sections import Lmcache
from pdserve.recipe.vllm_names import FLAGS
from pdserve.roles import is_engine

FactsT = TypeVar("FactsT")
"""What the values of a program's flags are made of."""


@dataclass(frozen=True)
class Each:
    """A flag that is given once for each value."""

    values: tuple[str, ...]


@dataclass(frozen=True)
class Condition:
    """A condition under which pdserve sets a flag that a recipe may set otherwise."""

    text: str
    """for ..."""
    holds: Callable[[Recipe, str], bool]
    """Tells whether it holds, of a recipe and the section that has the flag (a role, or lmcache)."""
    path: Callable[[str], Path]
    """Section -> the key of the recipe that decides it."""


@dataclass(frozen=True)
class OwnedFlag(Generic[FactsT]):
    """A flag that pdserve sets itself: its value, and what a recipe writes instead."""

    instead: str
    """What to write instead."""
    value: Callable[[FactsT], Any] | None = None
    """None: the flag is never set, and refused all the same (another name of one that is). A value of None: not in
    this command line."""
    condition: Condition | None = None
    """None: it is refused in every recipe."""


def own_flags(table: Mapping[str, OwnedFlag[FactsT]], facts: FactsT) -> dict[str, Any]:
    """The flags that pdserve sets in this command line, in the order of the table."""
    values = {name: flag.value(facts) for name, flag in table.items() if flag.value is not None}
    return {name: value for name, value in values.items() if value is not None}


def flag_words(values: Mapping[str, Any]) -> Iterator[str]:
    """A typed flag map as arguments: true --flag, false --no-flag, list --flag a b, mapping --flag JSON,
    Each --flag a --flag b."""
    for name, value in values.items():
        if value is None:
            continue
        if isinstance(value, bool):
            yield f"--{name}" if value else f"--no-{name}"
        elif isinstance(value, Each):
            yield from (word for item in value.values for word in (f"--{name}", item))
        elif isinstance(value, list):
            yield f"--{name}"
            yield from (_text(item) for item in value)
        elif (text := _text(value)).startswith("-"):
            yield f"--{name}={text}"  # argparse would take it for a flag
        else:
            yield f"--{name}"
            yield text


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict | list | bool) or value is None:
        return json.dumps(value, default=str)  # dates of YAML: the rules of a recipe refuse them later
    return str(value)


@dataclass(frozen=True)
class Rendezvous:
    """The place where the processes of an instance meet: the leader's address and ports."""

    address: str
    master_port: int | None
    """The port at which processes meet that share one API server; where each has its own, only their ranks meet."""
    dp_rpc_port: int | None


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """The facts that the flags of an engine process depend on."""

    served_name: str
    revision: str | None
    address: str
    """The address of the node whose API server it is."""
    port: int | None
    """None on followers, which have no API server."""
    parallel: Parallel
    rank: int
    """The rank of this process among those of the instance."""
    rendezvous: Rendezvous | None
    kv_transfer: Mapping[str, Any] | None
    kv_events: Mapping[str, Any] | None


def _spans_nodes(recipe: Recipe, section: str) -> bool:
    return any(role.parallel.nodes > 1 for name, role in recipe.roles() if name == section)


def _with_master(line: EngineFacts, value: str | int | None) -> str | int | None:
    """Return the value of a flag by which vLLM itself spreads an instance over nodes."""
    return None if line.rendezvous is None or line.rendezvous.master_port is None else value


def _first_rank(line: EngineFacts) -> int:
    return line.rank * line.parallel.ranks_of_server


def _in_mode(line: EngineFacts, mode: LoadBalancing, value: int | bool) -> int | bool | None:
    return value if line.parallel.load_balancing == mode else None


def _publishes(recipe: Recipe, section: str) -> bool:
    return is_engine(section) and publishes_kv_events(recipe, section)


_PARALLEL = "<role>.parallel"
_MODEL = "set model.path or model.id"
_HTTP = "the proxy speaks HTTP to engines"
_CONNECTOR = "set <role>.connector and the lmcache section"
_DP = f"set {_PARALLEL}.dp and {_PARALLEL}.nodes"
_PCP = f"set {_PARALLEL}.pcp"
_BALANCING = f"set {_PARALLEL}.load_balancing"

ENGINE_FLAGS: dict[str, OwnedFlag[EngineFacts]] = {
    "model": OwnedFlag(_MODEL),  # part of the program: `vllm serve` takes it without the flag
    "model-tag": OwnedFlag(_MODEL),
    "served-model-name": OwnedFlag("set model.served_name", lambda line: line.served_name),
    "revision": OwnedFlag("set model.revision", lambda line: line.revision),
    "config": OwnedFlag("write the flags of that file under args"),
    "host": OwnedFlag(
        "engines listen on their node's address; clients talk to the proxy (proxy.host)",
        lambda line: None if line.port is None else line.address,
    ),
    "port": OwnedFlag("set ports.<role>", lambda line: line.port),
    "uds": OwnedFlag("set ports.<role>"),
    "grpc": OwnedFlag(_HTTP),
    "grpc-port": OwnedFlag(_HTTP),
    "root-path": OwnedFlag("the proxy needs the engines' paths as they are"),
    "api-key": OwnedFlag("every deployment makes its own key for its engines"),
    "tensor-parallel-size": OwnedFlag(f"set {_PARALLEL}.tp", lambda line: line.parallel.tp),
    "tp": OwnedFlag(f"set {_PARALLEL}.tp"),
    "pipeline-parallel-size": OwnedFlag(
        f"set {_PARALLEL}.pp", lambda line: line.parallel.pp if line.parallel.pp > 1 else None
    ),
    "pp": OwnedFlag(f"set {_PARALLEL}.pp"),
    "prefill-context-parallel-size": OwnedFlag(_PCP, lambda line: line.parallel.pcp if line.parallel.pcp > 1 else None),
    "pcp": OwnedFlag(_PCP),
    "data-parallel-size": OwnedFlag(
        f"set {_PARALLEL}.dp", lambda line: line.parallel.dp if line.parallel.dp > 1 else None
    ),
    "dp": OwnedFlag(f"set {_PARALLEL}.dp"),
    "data-parallel-size-local": OwnedFlag(_DP, lambda line: _in_mode(line, "hybrid", line.parallel.ranks_of_server)),
    "data-parallel-start-rank": OwnedFlag(_DP, lambda line: _in_mode(line, "hybrid", _first_rank(line))),
    "data-parallel-rank": OwnedFlag(_DP, lambda line: _in_mode(line, "external", _first_rank(line))),
    "data-parallel-hybrid-lb": OwnedFlag(_BALANCING, lambda line: _in_mode(line, "hybrid", True)),
    "data-parallel-external-lb": OwnedFlag(_BALANCING, lambda line: _in_mode(line, "external", True)),
    "data-parallel-multi-port-external-lb": OwnedFlag(f"{_BALANCING}: external"),
    # Stated with dp, because vLLM would start a process for each rank.
    "api-server-count": OwnedFlag(
        f"set {_PARALLEL}.api_servers",
        lambda line: (
            line.parallel.api_servers
            if line.port is not None and (line.parallel.dp > 1 or line.parallel.api_servers > 1)
            else None
        ),
    ),
    "enable-expert-parallel": OwnedFlag(f"set {_PARALLEL}.ep", lambda line: line.parallel.ep or None),
    "ep": OwnedFlag(f"set {_PARALLEL}.ep"),
    "nnodes": OwnedFlag(f"set {_PARALLEL}.nodes", lambda line: _with_master(line, line.parallel.nodes)),
    "node-rank": OwnedFlag(f"set {_PARALLEL}.nodes", lambda line: _with_master(line, line.rank)),
    "master-addr": OwnedFlag(
        f"set {_PARALLEL}.nodes", lambda line: line.rendezvous and _with_master(line, line.rendezvous.address)
    ),
    "master-port": OwnedFlag("set ports.dp_master", lambda line: line.rendezvous and line.rendezvous.master_port),
    # vLLM's own multi-node mode; without `mp` it would look for Ray on ROCm.
    "distributed-executor-backend": OwnedFlag(
        "remove it, or keep the instance within a node",
        lambda line: "mp" if line.parallel.nodes > 1 else None,
        Condition("for an instance that spans nodes", _spans_nodes, lambda role: (role, "parallel", "nodes")),
    ),
    "data-parallel-address": OwnedFlag(
        _DP, lambda line: line.rendezvous.address if line.rendezvous and line.rendezvous.dp_rpc_port else None
    ),
    "data-parallel-rpc-port": OwnedFlag(_DP, lambda line: line.rendezvous and line.rendezvous.dp_rpc_port),
    "headless": OwnedFlag(f"set {_PARALLEL}.nodes", lambda line: line.port is None or None),
    "kv-transfer-config": OwnedFlag(
        "set <role>.connector (kind: raw takes a whole mapping)", lambda line: line.kv_transfer
    ),
    "kv-events-config": OwnedFlag(
        "remove the flag, or the policy",
        lambda line: line.kv_events,
        Condition("for the policy kv_events", _publishes, lambda role: ("proxy", "routing", role, "kind")),
    ),
    "kv-offloading-backend": OwnedFlag(_CONNECTOR),
    "kv-offloading-size": OwnedFlag(_CONNECTOR),
    "device-ids": OwnedFlag("set <role>.devices"),
}
"""Every `data-parallel-*` flag is refused as well."""

_NODE_ADDRESS = "it is the address of the engine's node"
_DEVICES = "set <role>.devices"
_OWNED_ENV: dict[str, str] = {
    "VLLM_HOST_IP": _NODE_ADDRESS,
    "VLLM_PORT": "set ports.<role>",
    "VLLM_API_KEY": "every deployment makes its own key for its engines",
    "VLLM_SERVER_DEV_MODE": "set engine.cache_reset_endpoint",
    "VLLM_DP_MASTER_IP": f"set {_PARALLEL}.nodes",
    "VLLM_DP_MASTER_PORT": "set ports.dp_master",
    "VLLM_DP_RANK": f"set {_PARALLEL}.dp",
    "VLLM_DP_SIZE": f"set {_PARALLEL}.dp",
    "PYTHONHASHSEED": "set engine.hash_seed (engines and LMCache must agree)",
    "CUDA_VISIBLE_DEVICES": _DEVICES,
    "HIP_VISIBLE_DEVICES": _DEVICES,
    "ROCR_VISIBLE_DEVICES": _DEVICES,
    "GPU_DEVICE_ORDINAL": _DEVICES,
    **{name: text for section in SECTIONS for name, text in section.ABOUT.owned_variables.items()},
}


def known_flags() -> frozenset[str]:
    """Flags that vLLM is known to have."""
    return FLAGS


def where_instead(flag: str, role: str) -> str | None:
    """Return what to write instead of `flag`, if pdserve sets it in every recipe."""
    owned = ENGINE_FLAGS.get(flag.split(".")[0])
    text = owned.instead if owned is not None and owned.condition is None else None
    if owned is None and flag.startswith("data-parallel-"):
        text = _DP
    return _for_role(text, role) if text else None


def env_instead(variable: str, role: str) -> str | None:
    """Return what to do instead of setting `variable`, if pdserve sets it."""
    text = _OWNED_ENV.get(variable)
    if text is None and variable.startswith("PDSERVE_"):
        text = "PDSERVE_ variables are how pdserve talks to its own processes"
    return _for_role(text, role) if text else None


def _for_role(text: str, role: str) -> str:
    return text.replace("<role>", "prefill" if role == "engine" else role)


LOOPBACK = "127.0.0.1"
"""A server serves its own node only. Neither requests nor HTTP are authenticated, and /env prints the environment."""
_STAGING = frozenset({"fs", "fs_native"})
"""L2 adapters that write a file under another name and rename it."""


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """The facts that the flags of a server depend on."""

    section: Lmcache
    instance_id: str
    staging: str
    """A name that no other server of the deployment has; folders of it are below L2's."""
    port: int
    http_port: int
    threads: int
    """For transfers, unless the recipe sets another number."""
    on_cpu: bool


def number(value: float) -> str:
    """1 rather than 1.0: both parse, one reads better."""
    return str(int(value)) if value == int(value) else str(value)


def _initial_l1(line: ServerFacts) -> str | None:
    if line.on_cpu:
        return None
    return str(max(1, math.floor(min(line.section.l1_init_size_gb, line.section.l1_size_gb))))


def _with_staging(adapter: Mapping[str, Any], staging: str) -> dict[str, Any]:
    """An adapter whose unfinished files are its server's own. LMCache names such a file after its key: when two servers
    store one key at the same time, the one that fails leaves a cut file under the final name, which lookups find for
    ever and no load can read (lmcache#4991)."""
    if adapter.get("type") not in _STAGING:
        return dict(adapter)
    return {"relative_tmp_dir": f".staging-{staging}", **adapter}


SERVER_FLAGS: dict[str, OwnedFlag[ServerFacts]] = {
    "instance-id": OwnedFlag("pdserve knows its own server from a stale one by it", lambda line: line.instance_id),
    "host": OwnedFlag("the server listens on loopback of its node", lambda line: LOOPBACK),
    "port": OwnedFlag("set ports.lmcache", lambda line: line.port),
    "http-host": OwnedFlag("its HTTP API has no authentication and stays on loopback", lambda line: LOOPBACK),
    "http-port": OwnedFlag("set ports.lmcache_http", lambda line: line.http_port),
    "l1-size-gb": OwnedFlag("set lmcache.l1_size_gb", lambda line: number(line.section.l1_size_gb)),
    # Nothing is pinned on a CPU, so the server would turn lazy growth off itself, with a warning.
    "l1-use-lazy": OwnedFlag(
        "remove it",
        lambda line: False if line.on_cpu else None,
        Condition("for a CPU", lambda recipe, _: recipe.platform == "cpu", lambda _: ("platform",)),
    ),
    "l1-init-size-gb": OwnedFlag("set lmcache.l1_init_size_gb", _initial_l1),
    "l1-read-ttl-seconds": OwnedFlag("set lmcache.l1_read_ttl_seconds", lambda line: line.section.l1_read_ttl_seconds),
    "l1-write-ttl-seconds": OwnedFlag(
        "set lmcache.l1_write_ttl_seconds", lambda line: line.section.l1_write_ttl_seconds
    ),
    "chunk-size": OwnedFlag("set lmcache.chunk_size", lambda line: line.section.chunk_size),
    "max-workers": OwnedFlag("set lmcache.max_workers", lambda line: line.section.max_workers or line.threads),
    "eviction-policy": OwnedFlag("set lmcache.eviction.policy", lambda line: line.section.eviction.policy),
    "eviction-trigger-watermark": OwnedFlag(
        "set lmcache.eviction.watermark", lambda line: number(line.section.eviction.watermark)
    ),
    "eviction-ratio": OwnedFlag("set lmcache.eviction.ratio", lambda line: number(line.section.eviction.ratio)),
    "supported-transfer-mode": OwnedFlag("set lmcache.transfer_mode", lambda line: line.section.transfer_mode),
    "worker-reap-timeout-seconds": OwnedFlag(
        "set lmcache.worker_reap_seconds", lambda line: number(line.section.worker_reap_seconds)
    ),
    "shm-name": OwnedFlag("set lmcache.shm_name", lambda line: line.section.shm_name),
    "l2-adapter": OwnedFlag(
        "set lmcache.l2",
        lambda line: Each(tuple(json.dumps(_with_staging(adapter, line.staging)) for adapter in line.section.l2)),
    ),
}
