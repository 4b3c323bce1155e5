"""The needs of a recipe's container on every node, before anything starts in it: image, device files, compile cache.

A stage of its own, because `docker run` would fetch tens of gigabytes within the time that a first answer may take,
without a word. docker fetches on each node that has no such image; for apptainer and pyxis one node makes the file
that all of them use. What is there is not fetched again.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pdserve.errors import PreflightError
from pdserve.logs.causes import Hint
from pdserve.plan import container
from pdserve.plan.container import cache_of, image_of, shared_file
from pdserve.preflight.finding import join_errors
from pdserve.printable import size_text
from pdserve.reach.candidates import Candidate
from pdserve.reach.containers import ToolEnd, cannot_run_error, container_cause, docker_hangs, is_absent, run_tool
from pdserve.recipe.container_options import VERBS, merge_options, uses_rdma
from pdserve.recipe.model import Recipe
from pdserve.recipe.sections import Container

Report = Callable[[str], None]
"""Gets one line for the user."""

_TOOL_SECONDS = 30.0
"""For what looks and fetches nothing: a healthy docker answers within one."""
_QUIET_SECONDS = 10.0
_TAIL_LINES = 8
_PATIENCE_SECONDS = 10.0
_GIB = 1 << 30
_ID = re.compile(r"sha256:[0-9a-f]{64}")
ResultT = TypeVar("ResultT")


async def provide_images(
    machines: Sequence[Candidate], recipe: Recipe, *, run_dir: Path, store: str, report: Report
) -> None:
    """Provide each node with what the recipe's container needs. Raises PreflightError with all that cannot have it."""
    assert recipe.container is not None
    stage = _Stage(
        recipe.container, image_of(recipe), run_dir, recipe.timeouts.container_seconds, report, nodes=len(machines)
    )
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    file = shared_file(stage.container.kind, stage.image, store)
    if file is not None:
        await _make_file(stage, machines[0], Path(file))
    elif stage.container.kind == "docker":
        _compare(stage, machines, await _on_all(machines, lambda machine: _provide_docker(stage, machine)))
    else:
        await _on_all(machines, lambda machine: _check_file(stage, machine))
    if uses_rdma(recipe) and not _leaves_out_verbs(stage.container):
        await _on_all(machines, lambda machine: _check_verbs(stage, machine))
    if (folder := cache_of(recipe)) is not None:
        warm = await _on_all(machines, lambda machine: _make_cache(stage, machine, folder))
        for state, text in ((True, "warm"), (False, "cold: kernels are compiled by this start")):
            names = [machine.name for machine, there in zip(machines, warm, strict=True) if there is state]
            if names:
                report(f"compile cache {folder} on {', '.join(names)}: {text}")


@dataclass
class _Stage:
    """Takes the steps of one start: tools on the nodes, progress, errors."""

    container: Container
    image: str
    folder: Path
    """The run directory, for logs."""
    seconds: float
    report: Report
    nodes: int
    complete: int = 0
    """Nodes that have it."""
    fetched: bool = False
    shown: float = 0.0

    def log(self, node: str) -> Path:
        return self.folder / "logs" / f"image@{node}.log"

    async def run(
        self, on: Candidate, argv: Sequence[str], *, seconds: float = _TOOL_SECONDS, watch: Report | None = None
    ) -> ToolEnd:
        """Run a tool there. Raises PreflightError where the way there cannot be run here."""
        log, marker = self.log(on.name), f"{self.folder.name}/image@{on.name}"
        try:
            return await run_tool(on.reach, on.name, argv, log=log, marker=marker, seconds=seconds, watch=watch)
        except OSError as error:
            raise cannot_run_error(str(error.filename), error, where=f"image@{on.name}") from error

    def step(self, node: str, text: str) -> None:
        """Say how far one node is; a line every few seconds for all of them."""
        if time.monotonic() - self.shown >= _QUIET_SECONDS:
            self.shown = time.monotonic()
            others = f"; {self.complete} of {self.nodes} nodes have it" if self.nodes > 1 else ""
            self.report(f"image: {node}: {text}{others}")

    def error(self, node: str, what: str, end: ToolEnd, program: str, *, fetching: bool = False) -> PreflightError:
        """Return what a tool that failed means. `fetching`: its limit was the one for the image."""
        known = container_cause(end.text, node=node, program=program, fetching=True)
        lines = [line for line in end.text.splitlines() if line.strip()]
        if end.code is None:
            what += " in time"
            known = _too_late(program, node, fetching=fetching)
        return PreflightError(
            f"{what} on {node}",
            where=f"image@{node}",
            cause=None if known is None else known.cause,
            todo="read the log" if known is None else known.todo,
            evidence=(f"log: {self.log(node)}", *lines[-_TAIL_LINES:]),
        )


def _too_late(program: str, node: str, *, fetching: bool) -> Hint:
    if fetching:
        return Hint("it did not end in its limit", "raise timeouts.container_seconds, or look why it is slow")
    if program == "docker":
        return docker_hangs(node, _TOOL_SECONDS, or_way=True)
    return Hint(
        f"{program} gave no answer within {_TOOL_SECONDS:g} s: its disk, or the way there (ssh, srun), hangs",
        f"look on {node} whether the folder can be listed",
    )


async def _on_all(
    machines: Sequence[Candidate], work: Callable[[Candidate], Coroutine[Any, Any, ResultT]]
) -> list[ResultT]:
    """Do work on all nodes at once; a fetch may last for an hour, so that one that fails ends the others."""

    def refused(errors: Sequence[PreflightError], failed: Collection[str], late: Sequence[str]) -> PreflightError:
        what = f"{len(errors)} of {len(machines)} nodes cannot have the container: {', '.join(failed)}"
        also = [f"what {', '.join(late)} had begun was stopped"] if late else []
        return join_errors(errors, what, todo=errors[0].todo, also=also)

    return await ask_all({machine.name: work(machine) for machine in machines}, _PATIENCE_SECONDS, refused)


Refuse = Callable[[Sequence[PreflightError], Collection[str], Sequence[str]], PreflightError]
"""Makes one error of the errors of several nodes, the nodes' names, and the names of nodes that have not answered."""


async def ask_all(work: Mapping[str, Coroutine[Any, Any, ResultT]], patience: float, refused: Refuse) -> list[ResultT]:
    """Return what each node (by name) gives, all at once.

    Once a node has failed, the others are waited for `patience` seconds. Raises one PreflightError with every node
    that fails; a bug as it is."""
    tasks = {name: asyncio.create_task(each) for name, each in work.items()}
    try:
        _, pending = await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_EXCEPTION)
        if pending:
            await asyncio.wait(pending, timeout=patience)
        failed = {name: error for name, task in tasks.items() if task.done() and (error := task.exception())}
        errors = [error for error in failed.values() if isinstance(error, PreflightError)]
        if len(errors) < len(failed):
            raise next(error for error in failed.values() if not isinstance(error, PreflightError))
        if errors:
            raise refused(errors, failed, [name for name, task in tasks.items() if not task.done()])
        return [task.result() for task in tasks.values()]
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


async def _provide_docker(stage: _Stage, on: Candidate) -> str:
    """Return the image's id there."""
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


async def _check_disk(stage: _Stage, on: Candidate) -> None:
    """Check that docker's disk has room for the image. Where that cannot be known, nothing is said: then the fetch
    shows it."""
    root = await stage.run(on, container.docker_root_argv())
    folder = root.text.strip().splitlines()[-1] if root.code == 0 and root.text.strip() else ""
    if not folder.startswith("/"):
        return
    free = await stage.run(on, container.free_bytes_argv(folder))
    last = free.text.split()[-1] if free.code == 0 and free.text.split() else ""
    if last.isdecimal():
        _check_room(stage, on.name, folder, int(last))


def _check_room(stage: _Stage, node: str, folder: str, free: int) -> None:
    if free < stage.container.disk_gib * _GIB:
        raise PreflightError(
            f"the disk of {folder} on {node} has {size_text(free)} free, and {stage.image} is not there yet",
            where="container.disk_gib",
            cause=f"container.disk_gib asks for {stage.container.disk_gib:g} GiB, which an image takes unpacked",
            todo="make room there (docker image prune), or lower container.disk_gib for a smaller image",
        )


async def _fetch(stage: _Stage, on: Candidate, argv: Sequence[str], progress: Callable[[str], str | None]) -> None:
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


async def _make_file(stage: _Stage, on: Candidate, file: Path) -> None:
    """Make the file of an image once for all nodes; one that another start makes meanwhile is made twice, and the last
    one stays."""
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


def _is_made(stage: _Stage, file: Path) -> bool:
    """Tell whether the file of an image is there; where it is not, there is a folder with room for it."""
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
    _check_room(stage, "this machine", str(file.parent), free)
    return False


async def _check_file(stage: _Stage, on: Candidate) -> None:
    looked = await stage.run(on, container.find_image_argv(stage.container, stage.image))
    if looked.code == 1:
        raise PreflightError(
            f"{on.name} cannot read {stage.image}",
            where="container.image",
            todo="copy it there, or to a folder that all nodes share",
        )
    if looked.code != 0:
        raise stage.error(on.name, f"{stage.image} cannot be looked for", looked, "test")


def _compare(stage: _Stage, machines: Sequence[Candidate], ids: Sequence[str]) -> None:
    """Check that all nodes have one image: a tag that has moved gives nodes that fetch at different times different
    images."""
    if len(set(ids)) > 1:
        raise PreflightError(
            f"the nodes have different images under {stage.image}",
            where="container.image",
            cause="the tag was moved between their pulls",
            todo="name the image by its digest (NAME@sha256:...), or docker pull it on every node",
            evidence=tuple(f"{machine.name}: {id_}" for machine, id_ in zip(machines, ids, strict=True)),
        )


def _leaves_out_verbs(container: Container) -> bool:
    return container.kind == "docker" and not merge_options("docker", [f"--device={VERBS}"], [], container.leave_out)


async def _check_verbs(stage: _Stage, on: Candidate) -> None:
    """Check that RDMA devices are there: a container that is given a device which is not there does not start, and
    names no cause."""
    looked = await stage.run(on, ("test", "-d", VERBS))
    if looked.code == 1:
        raise PreflightError(
            f"{on.name} has no {VERBS}",
            where=f"image@{on.name}",
            cause="a connector moves KV by RDMA, and no driver of an adapter is loaded there",
            todo="load the driver, or set protocol: tcp on the connectors",
        )


async def _make_cache(stage: _Stage, on: Candidate, folder: str) -> bool:
    """Make the cache folder, and return whether anything is in it. It holds code that is loaded, so it must be the
    user's own."""
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
