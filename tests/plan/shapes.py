"""Layouts that no shipped recipe has, with the nodes that each is planned for, and the plans in golden_shapes.

The recipes set what shipped ones leave at its default. tests/plan/test_real.py gives the same plans to the engines.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from pdserve.plan.model import Plan
from pdserve.plan.node import Node
from pdserve.recipe.model import Recipe
from tests.plan.kit import LMCACHE, MOONCAKE, MULTI, NIXL, aggregated, hosts, on_gpus, plan, recipe, with_lmcache

FOLDER = Path(__file__).parent / "golden_shapes"
MORIIO: dict[str, Any] = {"kind": "moriio", "accept_unsafe_aborts": True}
RDMA: dict[str, Any] = {"kind": "mooncake", "protocol": "rdma", "device_name": "rdma0,rdma1", "num_workers": 32}
RAW = {"kv_connector": "MooncakeConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"num_workers": 3}}


def both(connector: dict[str, Any], **prefill: Any) -> dict[str, Any]:
    """One connector on both sides."""
    return {"prefill": {"connector": connector, **prefill}, "decode": {"connector": connector}}


ONE_CPU: tuple[dict[str, Any], ...] = (
    with_lmcache(
        shm_name="pool",
        on_death="fail",
        l2=[{"type": "fs", "base_path": "/tmp/a b"}, {"type": "resp", "port": 1}],
        extra_args={"session-ttl-seconds": 60, "isolated-ipc": False},
        env={"LMCACHE_LOG_LEVEL": "DEBUG"},
    ),
    {"prefill": {"instances": 2}, "decode": {"kv_load_failure_policy": "recompute", "env": {"SHARED": "decode"}}},
    {
        "engine": {
            "env": {"OMP_NUM_THREADS": 1, "SHARED": "engine", "HF_TOKEN": {"secret": "MY_HF_TOKEN"}},
            "hash_seed": 7,
            "cache_reset_endpoint": True,
        },
        "setup": ["echo 'a b' && c", ["bash", "-c", "a && b"]],
        "allow_unknown_upstream": ["multiconnector-prom-metrics"],
        "timeouts": {
            "setup_seconds": 7,
            "lmcache_seconds": 11,
            "engine_seconds": 1800.5,
            "proxy_seconds": 13,
            "stop_seconds": 4,
            "transfer_abort_seconds": 45,
        },
        "proxy": {
            "workers": 3,
            "drain_seconds": 90,
            "routing": {"prefill": {"kind": "prefix_aware"}, "decode": {"kind": "kv_events"}},
            "on_empty_pool": "aggregate",
            "admission": {"decode": {"max_requests": 7}},
            "breaker": {"failures": 2},
            "health": {"failures": 9},
            "limits": {"max_connections": 11},
            "auth": {"keys_file": "../keys.jsonl"},
            "tls": {"certificate": "/etc/c.pem", "key": "k.pem"},
            "upstream_tls": {"ca": "ca.pem", "certificate": "/etc/our.pem", "key": "our.key"},
            "admin": {"port": 9000, "token_file": "token"},
            "log": "json",
            "otel": {"endpoint": "http://collector:4318/v1/traces"},
        },
    },
)
FETCHING: tuple[dict[str, Any], ...] = (
    on_gpus(),
    with_lmcache(),
    {
        "model": {"path": None, "id": "org/model", "revision": "abc"},
        "engine": {
            "python": "/opt/vllm/python",
            "args": {"download-dir": "/models"},
            "env": {"HF_TOKEN": {"secret": "MY_TOKEN"}},
        },
        "decode": {
            "args": {
                "speculative-config": {
                    "method": "eagle3",
                    "num_speculative_tokens": 3,
                    "model": "org/draft",
                    "revision": "v2",
                }
            }
        },
        "setup": ["first"],
    },
)
SPANNING = {"tp": 4, "pp": 2, "dp": 2, "ep": True, "nodes": 2}
HYBRID = {"pcp": 2, "dp": 8, "ep": True, "nodes": 2, "load_balancing": "hybrid", "api_servers": 3}
EXTERNAL = {"dp": 2, "ep": True, "load_balancing": "external"}
OFFLOADING = {"kind": "offloading", "cpu_gib": 4, "store_threshold": 2, "eviction": "arc"}
STORE = {"kind": "mooncake-store"}

SHAPES: dict[str, tuple[Recipe, tuple[Node, ...]]] = {
    "one-cpu": (recipe(*ONE_CPU), ()),
    "fetching": (recipe(*FETCHING), hosts(1, 1)),
    "spanning": (recipe(on_gpus(), both(NIXL, parallel=SPANNING)), hosts(16, 16)),
    "spanning-mooncake": (recipe(on_gpus(1, 8), both(RDMA, parallel={"tp": 16, "nodes": 2})), hosts(8, 8, 8)),
    "hybrid": (recipe(on_gpus(), both(NIXL, parallel=HYBRID)), hosts(8, 8, 1)),
    "external": (
        recipe(on_gpus(), both(MOONCAKE, parallel=EXTERNAL, instances=2, devices=[3, 2, 1, 0])),
        hosts(5),
    ),
    "internal-cpu": (
        recipe({"prefill": {"parallel": {"dp": 4, "nodes": 2}}, "decode": {"parallel": {"api_servers": 2}}}),
        hosts(0, 0),
    ),
    "events": (
        recipe(
            on_gpus(),
            {"proxy": {"routing": {"decode": {"kind": "kv_events"}}}, "decode": {"parallel": {"dp": 4}}},
        ),
        hosts(8, 8),
    ),
    "tp-rank": (
        recipe(
            on_gpus(4, 2),
            with_lmcache(per="tp-rank", on=["prefill", "decode"], transfer_mode="lmcache_driven"),
            {"decode": {"connector": MULTI}},
        ),
        hosts(8),
    ),
    "aggregated": (recipe(aggregated(instances=2), {"lmcache": {"max_workers": 3}}), ()),
    "moriio": (
        recipe(
            on_gpus(4, 4, "rocm"),
            both(MORIIO),
            {
                "prefill": {"connector": {"kind": "multi", "of": [MORIIO, LMCACHE]}, "instances": 2},
                "lmcache": {"l1_size_gb": 1},
            },
        ),
        hosts(16),
    ),
    "offloading": (recipe(aggregated(connector=OFFLOADING), {"lmcache": None, "platform": "cuda"}), ()),
    "store-alone": (
        recipe(
            aggregated(connector=STORE),
            {
                "lmcache": None,
                "mooncake_store": {
                    "segment_gib": 2,
                    "protocol": "tcp",
                    "on_death": "fail",
                    "extra_args": {"enable_offload": True},
                },
            },
        ),
        (),
    ),
    "raw": (recipe(both({"kind": "raw", "config": RAW})), ()),
}


def shape(name: str) -> Plan:
    """The plan of a layout."""
    wanted, nodes = SHAPES[name]
    return plan(wanted, *nodes)


def golden_files() -> dict[Path, str]:
    """Path -> what it must contain."""
    return {FOLDER / f"{name}.json": _short(shape(name)) for name in SHAPES}


def _short(plan: Plan) -> str:
    """Without defaults, and without the lists of a role that tests/golden shows; a flag has a line."""
    made = plan.model_dump(mode="json", exclude_defaults=True)
    for process in made["processes"]:
        for shown_elsewhere in ("libraries", "patches"):
            process.pop(shown_elsewhere, None)
        process["argv"] = shlex.join(process["argv"]).replace(" --", "\n--").split("\n")
        process["env"] = {kind: names for kind, names in process["env"].items() if kind not in ("allow", "unset")}
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"
