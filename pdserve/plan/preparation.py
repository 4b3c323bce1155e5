"""The processes before the engines: the recipe's setup commands, and the download of the weights.

Setup: one process for each command and node, where the engines will run; on several nodes the same command runs on all
of them at once, and the next one begins when all are done. Weights: one process a node and model (the recipe's own and
the one that writes drafts for it); engines that look into different caches (another HF_HOME or --download-dir) get one
each. Nodes that share a cache folder each have their own process; a lock in the folder settles which one downloads.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping, Sequence

from pdserve.plan.environment import setup_env, weights_env
from pdserve.plan.placement import Instance
from pdserve.plan.process import ExitProbe, Process
from pdserve.plan.running import RunningProcesses, free_name
from pdserve.recipe import effective
from pdserve.recipe.effective import HubModel, hub_models
from pdserve.recipe.model import Recipe, Role
from pdserve.recipe.sections import words_of

WEIGHTS_STAGE = -1
STOP_STAGE = 0
WEIGHTS_RECORDS = "weights"
"""Folder of the run directory in which each process records which commit it has."""
_CACHE_VARIABLES = ("XDG_CACHE_HOME", "HOME")
_DOWNLOAD_FLAGS = {"download-dir": "--cache-dir", "load-format": "--load-format"}
"""vLLM's flags that decide where and what it loads, and ours."""


def weights_processes(
    recipe: Recipe,
    instances: Sequence[Instance],
    *,
    run_dir: str,
    pythons: Mapping[str, str],
    hosts: Sequence[str],
    running: RunningProcesses,
) -> Iterator[Process]:
    """Yield the downloads: none for a local model, and where the recipe leaves it to the engines. `pythons`:
    interpreters, by node. What was fetched is fetched under the same name."""
    wanted: dict[tuple[str, object, HubModel], list[Role]] = {}
    for instance in instances:
        for share in instance.shares:
            for model in hub_models(recipe, instance.role):
                wanted.setdefault((share.node.name, _cache_settings(recipe, instance.role), model), []).append(
                    instance.role
                )
    done = running.of_role("weights")
    taken = {process.name for process in done}
    for (node, _, model), roles in wanted.items():
        words = (
            *("-m", "pdserve.weights", "--model", model.id),
            *(("--revision", model.revision) if model.revision is not None else ()),
            *_download_flags(recipe, roles[0]),
            "--record",
        )
        envs = [weights_env(recipe, role, hosts) for role in roles]
        same = (each for each in done if (each.node, each.argv[1:-1]) == (node, words) and each.env in envs)
        if (process := next(same, None)) is not None:
            name, env = process.name, process.env
        else:
            name, env = free_name("weights", taken), envs[0]
        yield Process(
            name=name,
            role="weights",
            node=node,
            argv=(pythons[node], *words, posixpath.join(run_dir, WEIGHTS_RECORDS, f"{name}.json")),
            env=env,
            log=f"logs/{name}@{node}.log",
            probe=ExitProbe(),
            start_stage=WEIGHTS_STAGE,
            stop_stage=STOP_STAGE,
            ready_seconds=recipe.timeouts.weights_seconds,
            stop_seconds=recipe.timeouts.stop_seconds,
        )


def _download_flags(recipe: Recipe, role: Role) -> Iterator[str]:
    args = effective.args_of(recipe, role)
    for flag, ours in _DOWNLOAD_FLAGS.items():
        if isinstance(value := args.get(flag), str):
            yield from (ours, value)


def _cache_settings(recipe: Recipe, role: Role) -> object:
    """Return what decides which folder the engines of a role look into."""
    env = effective.env_of(recipe, role)
    variables = {name: str(env[name]) for name in env if name.startswith("HF_") or name in _CACHE_VARIABLES}
    return (*_download_flags(recipe, role), *sorted(variables.items()))


def setup_processes(
    recipe: Recipe, instances: Sequence[Instance], *, hosts: Sequence[str], running: RunningProcesses
) -> Iterator[Process]:
    """Yield the processes of setup: setup-0, setup-1, ... on the first node that hosts an engine, setup-0-node1, ... on
    the further ones. A node that was set up keeps its number."""
    nodes = dict.fromkeys(share.node.name for instance in instances for share in instance.shares)
    for index, command in enumerate(recipe.setup):
        for node, rank in _setup_numbers(list(nodes), running).items():
            name = _setup_name(index, rank)
            yield Process(
                name=name,
                role="setup",
                node=node,
                argv=words_of(command),
                env=setup_env(recipe, hosts),
                log=f"logs/{name}@{node}.log",
                probe=ExitProbe(),
                start_stage=WEIGHTS_STAGE - len(recipe.setup) + index,
                stop_stage=STOP_STAGE,
                ready_seconds=recipe.timeouts.setup_seconds,
                stop_seconds=recipe.timeouts.stop_seconds,
            )


def _setup_name(index: int, rank: int) -> str:
    return f"setup-{index}" if rank == 0 else f"setup-{index}-node{rank}"


def _setup_numbers(nodes: Sequence[str], running: RunningProcesses) -> dict[str, int]:
    """Return the number that each node has in the names."""
    last = len(nodes) + len(running.of_role("setup"))
    done = {
        process.node: rank for rank in range(last) if (process := running.process(_setup_name(0, rank))) is not None
    }
    free = iter([rank for rank in range(last) if rank not in done.values()])
    return {node: done[node] if node in done else next(free) for node in nodes}
