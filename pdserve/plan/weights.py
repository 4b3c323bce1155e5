"""Fetching the weights: one process a node and a model that its engines load, done before anything else starts. The
models are the recipe's own and the one that writes drafts for it.

Engines of one node that look into different caches (another HF_HOME or --download-dir) get one each. Nodes that share
a cache folder each have their own process; which of them downloads is settled by a lock in the folder.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping, Sequence

from pdserve.plan.environment import weights_env
from pdserve.plan.nodes.placement import Instance
from pdserve.plan.process import ExitProbe, Process
from pdserve.plan.running import Running, free_name
from pdserve.recipe import effective
from pdserve.recipe.effective import HubModel, hub_models
from pdserve.recipe.model import Recipe, Role

START_STAGE = -1
STOP_STAGE = 0
RECORDS = "weights"
"""Folder of the run directory in which each process records which commit it has."""
_CACHE_VARIABLES = ("XDG_CACHE_HOME", "HOME")
_FLAGS = {"download-dir": "--cache-dir", "load-format": "--load-format"}
"""vLLM's flags that decide where and what it loads, and ours."""


def weights_processes(
    recipe: Recipe,
    instances: Sequence[Instance],
    *,
    run_dir: str,
    pythons: Mapping[str, str],
    hosts: Sequence[str],
    running: Running,
) -> Iterator[Process]:
    """None for a local model, and where the recipe leaves it to the engines. `pythons`: interpreters, by node. What
    was fetched is fetched under the same name."""
    wanted: dict[tuple[str, object, HubModel], list[Role]] = {}
    for instance in instances:
        for share in instance.shares:
            for model in hub_models(recipe, instance.role):
                wanted.setdefault((share.node.name, _cache_of(recipe, instance.role), model), []).append(instance.role)
    done = running.of_role("weights")
    taken = {process.name for process in done}
    for (node, _, model), roles in wanted.items():
        words = (
            *("-m", "pdserve.weights", "--model", model.id),
            *(("--revision", model.revision) if model.revision is not None else ()),
            *_own_flags(recipe, roles[0]),
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
            argv=(pythons[node], *words, posixpath.join(run_dir, RECORDS, f"{name}.json")),
            env=env,
            log=f"logs/{name}@{node}.log",
            probe=ExitProbe(),
            start_stage=START_STAGE,
            stop_stage=STOP_STAGE,
            ready_seconds=recipe.timeouts.weights_seconds,
            stop_seconds=recipe.timeouts.stop_seconds,
        )


def _own_flags(recipe: Recipe, role: Role) -> Iterator[str]:
    args = effective.args_of(recipe, role)
    for flag, ours in _FLAGS.items():
        if isinstance(value := args.get(flag), str):
            yield from (ours, value)


def _cache_of(recipe: Recipe, role: Role) -> object:
    """What decides which folder the engines of a role look into."""
    env = effective.env_of(recipe, role)
    variables = {name: str(env[name]) for name in env if name.startswith("HF_") or name in _CACHE_VARIABLES}
    return (*_own_flags(recipe, role), *sorted(variables.items()))
