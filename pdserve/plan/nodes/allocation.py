"""Whether a job's nodes are what a recipe needs: decided from its size alone, before a node is spoken to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.errors import PreflightError, RecipeError
from pdserve.plan.nodes import placement
from pdserve.plan.nodes.node import Node
from pdserve.plan.nodes.submit_line import submit_line
from pdserve.recipe.model import Recipe


@dataclass(frozen=True)
class JobShape:
    """What to ask of Slurm. `gpus_per_node` is 0 on the CPU platform."""

    nodes: int
    gpus_per_node: int


def job_shape(recipe: Recipe) -> JobShape:
    """slurm.nodes, or as many nodes as the roles need; each with devices_per_node devices, or as many as they need.

    Raises RecipeError where slurm.nodes are too few, and for what fits on no number of nodes.
    """
    wanted = recipe.slurm.nodes
    if recipe.platform == "cpu":
        needed = len(placement.nodes_for(recipe))
        if wanted is not None and wanted < needed:
            raise RecipeError(
                f"{_nodes(wanted)}, and an instance spans {needed}",
                where="slurm.nodes",
                todo=f"write {needed}, or leave it out",
            )
        return JobShape(wanted or needed, 0)
    if wanted is None or recipe.devices_per_node:
        nodes = placement.nodes_for(recipe)
        if wanted is not None and wanted < len(nodes):
            raise RecipeError(
                f"{_nodes(wanted)} of {recipe.devices_per_node} devices cannot hold {placement.device_sum(recipe)}",
                where="slurm.nodes",
                todo=f"write {len(nodes)}, or leave it out",
            )
        return JobShape(wanted or len(nodes), len(nodes[0].devices))
    for size in range(1, placement.devices_needed(recipe) + 1):
        if placement.fits(recipe, _unseen(wanted, size)):
            return JobShape(wanted, size)
    raise RecipeError(
        f"{_nodes(wanted)} cannot hold {placement.device_sum(recipe)}, however many devices they have",
        where="slurm.nodes",
        cause="an instance spans more nodes than there are",
        todo="raise it, or leave it out",
    )


def usable_nodes(recipe: Recipe, names: Sequence[str]) -> tuple[str, ...]:
    """The nodes of a job without those that the recipe excludes."""
    return tuple(name for name in names if name not in recipe.exclude_nodes)


def check_allocation(
    recipe: Recipe, names: Sequence[str], gpus_per_node: int | None, *, words: Sequence[str]
) -> str | None:
    """Raises PreflightError, with the sbatch line to type, if the job's nodes (all of them, by name) cannot hold the
    recipe; returns a warning if it leaves nodes without work. `gpus_per_node`: of the job; None where Slurm does not
    say, the nodes are then taken to be the recipe's own kind. `words`: the recipe and overrides, for that line."""
    shape = job_shape(recipe)
    usable = usable_nodes(recipe, names)
    left_out = [name for name in names if name in recipe.exclude_nodes]
    gpus = shape.gpus_per_node if gpus_per_node is None else gpus_per_node
    here = f"this job has {_nodes(len(names))}" + (f" with {gpus} GPUs each" if recipe.platform != "cpu" else "")
    if left_out:
        here += f", and the recipe excludes {', '.join(left_out)}"
    fits = len(usable) >= (recipe.slurm.nodes or 1)
    if fits and recipe.platform != "cpu":
        fits = placement.fits(recipe, _unseen(len(usable), gpus))
    if not fits:
        needs = _nodes(shape.nodes)
        if shape.gpus_per_node:
            needs += f" with {shape.gpus_per_node} GPUs each, for {placement.device_sum(recipe)}"
        line = submit_line(
            nodes=shape.nodes, gpus_per_node=shape.gpus_per_node, exclude=recipe.exclude_nodes, words=words
        )
        raise PreflightError(f"{here}; {recipe.name} needs {needs}", where="Slurm job", todo=line)
    idle = len(usable) - _nodes_with_work(recipe, len(usable), gpus)
    if idle > 0:
        return f"{here}; {recipe.name} leaves {_nodes(idle)} without work"
    return None


def _nodes_with_work(recipe: Recipe, count: int, gpus: int) -> int:
    placed = placement.place(recipe, _unseen(count, gpus))
    return len({share.node.name for instance in placed for share in instance.shares})


def _unseen(count: int, gpus: int) -> list[Node]:
    """Nodes before any was looked at; their names do not matter."""
    return [Node(name=f"node{i}", devices=tuple(range(gpus))) for i in range(count)]


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"
