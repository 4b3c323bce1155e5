"""What a container needs of a node beside its image: the device files of RDMA, and a folder for compiled kernels."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from pdserve.errors import PreflightError
from pdserve.plan import container
from pdserve.plan.container import cache_of
from pdserve.preflight.nodes.container_stage import ContainerStage, Report, on_all
from pdserve.reach.candidates import Candidate
from pdserve.recipe.container_options import VERBS, merged, uses_rdma
from pdserve.recipe.model import Recipe
from pdserve.recipe.sections import Container


async def check_verbs(stage: ContainerStage, machines: Sequence[Candidate], recipe: Recipe) -> None:
    """Where the container is given them. Raises PreflightError with every node that has none."""
    if uses_rdma(recipe) and not _without_verbs(stage.container):
        await on_all(machines, lambda machine: _verbs(stage, machine))


async def make_caches(stage: ContainerStage, machines: Sequence[Candidate], recipe: Recipe, report: Report) -> None:
    """Nothing where the recipe keeps none. Raises PreflightError with every node where there can be none."""
    if (folder := cache_of(recipe)) is not None:
        warm = await on_all(machines, lambda machine: _cache(stage, machine, folder))
        for line in _warmth(machines, warm, folder):
            report(line)


def _without_verbs(container: Container) -> bool:
    verbs = f"--device={VERBS}"
    return container.kind == "docker" and not merged("docker", [verbs], [], container.leave_out)


async def _verbs(stage: ContainerStage, on: Candidate) -> None:
    """A container that is given a device which is not there does not start, and names no cause."""
    looked = await stage.run(on, ("test", "-d", VERBS))
    if looked.code == 1:
        raise PreflightError(
            f"{on.name} has no {VERBS}",
            where=f"image@{on.name}",
            cause="a connector moves KV by RDMA, and no driver of an adapter is loaded there",
            todo="load the driver, or set protocol: tcp on the connectors",
        )


async def _cache(stage: ContainerStage, on: Candidate, folder: str) -> bool:
    """Whether anything is in it. It holds code that is loaded, so it must be the user's own."""
    made = await stage.run(on, container.make_cache_argv(folder))
    looked = await stage.run(on, container.inspect_cache_argv(folder)) if made.code == 0 else made
    lines = looked.text.splitlines()
    owner = next((line.split() for line in lines if line.startswith("owner ")), None)
    if looked.code != 0 or owner is None or len(owner) != 3:
        error = stage.error(on.name, f"the compile cache {folder} cannot be made", looked, "find")
        error.where, error.todo = "container.compile_cache", "name a folder that you may write to on every node"
        raise error
    uid, mode = owner[1:]
    if uid != str(os.getuid()) or int(mode, 8) & 0o022:
        raise PreflightError(
            f"the compile cache {folder} on {on.name} belongs to uid {uid}, mode {mode}",
            where="container.compile_cache",
            cause="what is in it is loaded as code, and others could put something there",
            todo=f"remove it, or chmod go-w {folder} as uid {os.getuid()}",
        )
    return "file" in lines


def _warmth(machines: Sequence[Candidate], warm: Sequence[bool], folder: str) -> Iterator[str]:
    for state, text in ((True, "warm"), (False, "cold: kernels are compiled by this start")):
        names = [machine.name for machine, there in zip(machines, warm, strict=True) if there is state]
        if names:
            yield f"compile cache {folder} on {', '.join(names)}: {text}"
