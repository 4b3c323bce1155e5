"""Why no number of nodes can run a recipe, as errors with the line to write."""

from __future__ import annotations

from pdserve.errors import PreflightError, RecipeError
from pdserve.plan.nodes.submit_line import submit_line
from pdserve.recipe.model import Parallel, Recipe, Role
from pdserve.roles import EngineRole


def on_one_node(parallel: Parallel) -> int:
    """Devices that an instance needs on each of its nodes."""
    return -(-parallel.workers // parallel.nodes)


def instance_too_large(recipe: Recipe, name: EngineRole, role: Role, size: int) -> RecipeError:
    """One instance alone is larger than its nodes, which have `size` devices."""
    parallel = role.parallel
    shared = recipe.lmcache is not None and name in recipe.lmcache.on  # its server serves one node only
    spread = "" if shared else f", or spread it: `nodes: {-(-parallel.workers // size)}`"
    line = f"write `tp: {size * parallel.nodes}`" if parallel.workers == parallel.tp else "lower tp, pp or dp"
    return RecipeError(
        f"an instance of {name} needs {on_one_node(parallel)} devices of one node, and a node has {size}",
        where=f"{name}.parallel",
        cause=f"{parallel.product()}, over {parallel.nodes} "
        f"{'node' if parallel.nodes == 1 else 'nodes'}, and devices_per_node is {size}",
        todo=f"{line}{spread}; or correct devices_per_node",
    )


def too_many_instances(needed: str, name: EngineRole, role: Role, most: int, nodes: str) -> RecipeError:
    """Each instance fits, and their number does not. `needed`: the sum of devices; `most`: instances that fit."""
    return RecipeError(
        f"{needed}, and a deployment has at most {nodes}",
        where=f"{name}.instances",
        cause=f"{role.instances} instances of {name} are too many",
        todo=f"write `instances: {most}`, or less; or start several deployments",
    )


def too_few_nodes(name: str, wanted: int, here: int, recipe: Recipe, recipe_file: str) -> PreflightError:
    """On a CPU there are no devices to count: what is missing are nodes."""
    line = submit_line(nodes=wanted, gpus_per_node=0, exclude=recipe.exclude_nodes, words=[recipe_file])
    return PreflightError(
        f"{name} spans {wanted} nodes, and there {'is 1' if here == 1 else f'are {here}'} here",
        todo=f"use {wanted} nodes: {line}, or pdserve up {recipe_file} --cluster FILE",
    )
