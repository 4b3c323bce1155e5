"""Recipes, nodes and versions for planner tests: the least that is valid, plus what a test changes."""

from __future__ import annotations

from typing import Any

from pdserve.plan.build import build_plan
from pdserve.plan.model import Plan, Versions
from pdserve.plan.node import Node
from pdserve.plan.placement import nodes_for
from pdserve.plan.process import Process
from pdserve.plan.running import NOTHING, RunningProcesses
from pdserve.recipe.model import Recipe

VERSIONS = Versions(vllm="0.32.0", lmcache="0.5.6", mooncake="0.3.13.post1", nixl="1.5.1")
MOONCAKE: dict[str, Any] = {"kind": "mooncake", "protocol": "tcp"}
LMCACHE: dict[str, Any] = {"kind": "lmcache-mp"}
MULTI: dict[str, Any] = {"kind": "multi", "of": [MOONCAKE, LMCACHE]}
NIXL: dict[str, Any] = {"kind": "nixl"}


def recipe(*changes: dict[str, Any]) -> Recipe:
    """1P1D on CPU with Mooncake, and whatever the changes say on top."""
    document: dict[str, Any] = {
        "schema": 1,
        "name": "test",
        "platform": "cpu",
        "status": "tested",
        "model": {"path": "models/tiny", "served_name": "tiny"},
        "prefill": {"connector": MOONCAKE},
        "decode": {"connector": MOONCAKE},
    }
    for change in changes:
        document = _merge(document, change)
    return Recipe.model_validate(document)


def with_lmcache(**section: Any) -> dict[str, Any]:
    """LMCache on prefill, the way the CPU recipes have it."""
    return {
        "prefill": {"connector": MULTI},
        "lmcache": {"l1_size_gb": 1, "transfer_mode": "auto", **section},
    }


def on_gpus(prefill_tp: int = 1, decode_tp: int = 1, platform: str = "cuda") -> dict[str, Any]:
    """The same on accelerators."""
    return {
        "platform": platform,
        "prefill": {"parallel": {"tp": prefill_tp}},
        "decode": {"parallel": {"tp": decode_tp}},
    }


def aggregated(**role: Any) -> dict[str, Any]:
    """One engine with LMCache and no prefill/decode."""
    return {
        "mode": "aggregated",
        "prefill": None,
        "decode": None,
        "aggregated": {"connector": LMCACHE, **role},
        "lmcache": {"on": ["aggregated"], "l1_size_gb": 1, "transfer_mode": "auto"},
    }


def hosts(*sizes: int) -> tuple[Node, ...]:
    """Nodes with so many devices each, at addresses of their own."""
    return tuple(
        Node(name=f"host{i}", address=f"192.0.2.{i + 1}", devices=tuple(range(size))) for i, size in enumerate(sizes)
    )


def plan(
    wanted: Recipe,
    *nodes: Node,
    versions: Versions = VERSIONS,
    python: str = "python",
    running: RunningProcesses = NOTHING,
) -> Plan:
    """The plan for these nodes, or for hypothetical ones."""
    return build_plan(
        wanted,
        nodes or nodes_for(wanted),
        run_dir="/run/pdserve/test",
        run_id="r1",
        versions=versions,
        python=python,
        recipe_dir="/srv/recipes",
        running=running,
    )


def value_of(process: Process, flag: str) -> str:
    """What follows a flag on the command line. ValueError if it is not there."""
    return process.argv[process.argv.index(flag) + 1]


def _merge(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in change.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict) and key != "connector":
            merged[key] = _merge(old, value)
        else:
            merged[key] = value
    return merged
