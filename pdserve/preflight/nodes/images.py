"""The image of a container on every node, before anything is started in them.

A stage of its own, because `docker run` would fetch tens of gigabytes within the time that a first answer may take,
without a word. docker fetches on each node that has no such image; for apptainer and pyxis one node makes the file
that all of them use. What is there is not fetched again.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pdserve.errors import PreflightError
from pdserve.plan import container
from pdserve.plan.container import image_of, shared_file
from pdserve.preflight.nodes.container_folders import check_verbs, make_caches
from pdserve.preflight.nodes.container_stage import ContainerStage, Report, on_all
from pdserve.preflight.nodes.image_faults import is_absent
from pdserve.printable import size_text
from pdserve.reach.candidates import Candidate
from pdserve.recipe.model import Recipe

_GIB = 1 << 30
_ID = re.compile(r"sha256:[0-9a-f]{64}")


async def provide_images(
    machines: Sequence[Candidate], recipe: Recipe, *, run_dir: Path, store: str, report: Report
) -> None:
    """Returns once every node has what the recipe's container needs. Raises PreflightError with every node that
    cannot have it."""
    container = recipe.container
    assert container is not None
    stage = ContainerStage(
        container, image_of(recipe), run_dir, recipe.timeouts.container_seconds, report, nodes=len(machines)
    )
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    file = shared_file(container.kind, stage.image, store)
    if file is not None:
        await _make_file(stage, machines[0], Path(file))
    elif container.kind == "docker":
        ids = await on_all(machines, lambda machine: _docker(stage, machine))
        _compare(stage, machines, ids)
    else:
        await on_all(machines, lambda machine: _file(stage, machine))
    await check_verbs(stage, machines, recipe)
    await make_caches(stage, machines, recipe, report)


async def _docker(stage: ContainerStage, on: Candidate) -> str:
    """The image's id there."""
    looked = await stage.run(on, container.find_image_argv(stage.container, stage.image))
    if looked.code != 0:
        if not is_absent(looked.text):
            raise stage.error(on.name, "docker cannot be asked for images", looked, "docker")
        await _check_disk(stage, on)
        await _fetch(stage, on, container.fetch_image_argv("docker", stage.image, ""), container.pull_progress)
        looked = await stage.run(on, container.find_image_argv(stage.container, stage.image))
        if looked.code != 0:
            raise stage.error(on.name, f"{stage.image} was fetched and is not there", looked, "docker")
    stage.complete += 1
    match = _ID.search(looked.text)  # a login on the way may print more
    return looked.text.strip() if match is None else match.group()


async def _check_disk(stage: ContainerStage, on: Candidate) -> None:
    """Silent where it cannot be known: then the fetch shows it."""
    root = await stage.run(on, container.docker_root_argv())
    folder = root.text.strip().splitlines()[-1] if root.code == 0 and root.text.strip() else ""
    if not folder.startswith("/"):
        return
    free = await stage.run(on, container.free_bytes_argv(folder))
    last = free.text.split()[-1] if free.code == 0 and free.text.split() else ""
    if last.isdecimal():
        _enough(stage, on.name, folder, int(last))


def _enough(stage: ContainerStage, node: str, folder: str, free: int) -> None:
    if free < stage.container.disk_gib * _GIB:
        raise PreflightError(
            f"the disk of {folder} on {node} has {size_text(free)} free, and {stage.image} is not there yet",
            where="container.disk_gib",
            cause=f"container.disk_gib asks for {stage.container.disk_gib:g} GiB, which an image takes unpacked",
            todo="make room there (docker image prune), or lower container.disk_gib for a smaller image",
        )


async def _fetch(
    stage: ContainerStage, on: Candidate, argv: Sequence[str], progress: Callable[[str], str | None]
) -> None:
    if not stage.fetched:
        stage.fetched = True
        stage.report(f"image: fetching {stage.image} (at most {stage.seconds:g} s: timeouts.container_seconds)")

    def watch(text: str) -> None:
        if (step := progress(text)) is not None:
            stage.step(on.name, step)

    began = time.monotonic()
    end = await stage.run(on, argv, seconds=stage.seconds, watch=watch)
    if end.code != 0:
        raise stage.error(on.name, f"{stage.image} cannot be fetched", end, argv[0], fetching=True)
    stage.report(f"image: {on.name} has it after {time.monotonic() - began:.0f} s")


async def _make_file(stage: ContainerStage, on: Candidate, file: Path) -> None:
    """Once for all nodes; one that another start makes meanwhile is made twice, and the last one stays."""
    if _is_made(stage, file):
        return
    part = file.with_name(f"{stage.folder.name}.part{file.suffix}")

    def progress(text: str) -> str:
        size = part.stat().st_size if part.exists() else 0
        lines = [line for line in text.replace("\r", "\n").splitlines() if line.strip()]
        return f"{size_text(size)} written; {lines[-1].strip()[:80] if lines else 'no word yet'}"

    try:
        await _fetch(stage, on, container.fetch_image_argv(stage.container.kind, stage.image, str(part)), progress)
        if not part.exists():
            raise PreflightError(
                f"{on.name} has made {part}, which is not here",
                where="container.store",
                cause=f"{file.parent} is not the same folder on that node",
                todo="set container.store to a folder that all nodes share",
            )
        part.rename(file)
    finally:
        part.unlink(missing_ok=True)


def _is_made(stage: ContainerStage, file: Path) -> bool:
    """Where it is not, there is a folder with room for it."""
    if file.exists():
        return True
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        free = shutil.disk_usage(file.parent).free
    except OSError as error:
        raise PreflightError(
            f"{file.parent}: {error.strerror}",
            where="container.store",
            todo="set container.store to a folder that you may write to and all nodes share",
        ) from error
    _enough(stage, "this machine", str(file.parent), free)
    return False


async def _file(stage: ContainerStage, on: Candidate) -> None:
    looked = await stage.run(on, container.find_image_argv(stage.container, stage.image))
    if looked.code == 1:
        raise PreflightError(
            f"{on.name} cannot read {stage.image}",
            where="container.image",
            todo="copy it there, or to a folder that all nodes share",
        )
    if looked.code != 0:
        raise stage.error(on.name, f"{stage.image} cannot be looked for", looked, "test")


def _compare(stage: ContainerStage, machines: Sequence[Candidate], ids: Sequence[str]) -> None:
    """A tag that has moved gives nodes that fetch at different times different images."""
    if len(set(ids)) > 1:
        raise PreflightError(
            f"the nodes have different images under {stage.image}",
            where="container.image",
            cause="the tag was moved between their pulls",
            todo="name the image by its digest (NAME@sha256:...), or docker pull it on every node",
            evidence=tuple(f"{machine.name}: {id_}" for machine, id_ in zip(machines, ids, strict=True)),
        )
