"""The image of a container and the folder of compiled kernels on every node, before anything is started in them.

A stage of its own, because `docker run` would fetch tens of gigabytes within the time that a first answer may take,
without a word. docker fetches on each node that has no such image; for apptainer and pyxis one node makes the file
that all of them use. What is there is not fetched again.
"""

from __future__ import annotations

import asyncio
import getpass
import os
import re
import shutil
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pdserve.errors import PreflightError
from pdserve.plan.nodes import compile_cache, image
from pdserve.plan.nodes.container import cache_of, image_of
from pdserve.preflight.nodes.image_faults import ImageFault, fault, is_absent
from pdserve.preflight.nodes.together import together
from pdserve.reach.candidates import Candidate
from pdserve.reach.node_tool import ToolEnd, run_tool
from pdserve.recipe.model import Recipe
from pdserve.recipe.sections.container import Container

Report = Callable[[str], None]
"""Gets one line for the user."""

_TOOL_SECONDS = 120.0
_QUIET_SECONDS = 10.0
_GIB = 1 << 30
_TAIL_LINES = 8
_PATIENCE_SECONDS = 10.0
_ID = re.compile(r"sha256:[0-9a-f]{64}")
ResultT = TypeVar("ResultT")


@dataclass
class _Stage:
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
        """Raises PreflightError where the way there cannot be run here."""
        try:
            return await run_tool(
                on.reach,
                on.name,
                argv,
                log=self.log(on.name),
                marker=f"{self.folder.name}/image@{on.name}",
                seconds=seconds,
                watch=watch,
            )
        except OSError as error:
            program = error.filename
            raise PreflightError(
                f"{program} cannot be run here: {error.strerror}",
                where=f"image@{on.name}",
                cause=f"no {program} in a folder of PATH on this machine",
                todo=f"install {program} on the machine where pdserve is called, or add its folder to PATH",
            ) from error

    def step(self, node: str, text: str) -> None:
        """Says how far one node is; a line every few seconds for all of them."""
        if time.monotonic() - self.shown >= _QUIET_SECONDS:
            self.shown = time.monotonic()
            others = f"; {self.complete} of {self.nodes} nodes have it" if self.nodes > 1 else ""
            self.report(f"image: {node}: {text}{others}")

    def error(self, node: str, what: str, end: ToolEnd, program: str) -> PreflightError:
        known = fault(end.text, node=node, image=self.image, program=program, user=_user())
        lines = [line for line in end.text.splitlines() if line.strip()]
        if end.code is None:
            what += " in time"
            known = ImageFault(
                "it did not end in its limit", "raise timeouts.container_seconds, or look why it is slow"
            )
        return PreflightError(
            f"{what} on {node}",
            where=f"image@{node}",
            cause=None if known is None else known.cause,
            todo="read the log" if known is None else known.todo,
            evidence=(f"log: {self.log(node)}", *lines[-_TAIL_LINES:]),
        )


def _user() -> str:
    """Not every user id has a name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


async def provide_images(
    machines: Sequence[Candidate], recipe: Recipe, *, run_dir: Path, store: str, report: Report
) -> None:
    """Returns once every node has what the recipe's container needs. Raises PreflightError with every node that
    cannot have it."""
    container = recipe.container
    assert container is not None
    stage = _Stage(container, image_of(recipe), run_dir, recipe.timeouts.container_seconds, report, nodes=len(machines))
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    file = image.shared_file(container.kind, stage.image, store)
    if file is not None:
        await _make_file(stage, machines[0], Path(file))
    elif container.kind == "docker":
        ids = await _all(machines, lambda machine: _docker(stage, machine))
        _compare(stage, machines, ids)
    else:
        await _all(machines, lambda machine: _file(stage, machine))
    if (folder := cache_of(recipe)) is not None:
        warm = await _all(machines, lambda machine: _cache(stage, machine, folder))
        for line in _warmth(machines, warm, folder):
            report(line)


async def _docker(stage: _Stage, on: Candidate) -> str:
    """The image's id there."""
    looked = await stage.run(on, image.look_argv(stage.container, stage.image))
    if looked.code != 0:
        if not is_absent(looked.text):
            raise stage.error(on.name, "docker cannot be asked for images", looked, "docker")
        await _check_disk(stage, on)
        await _fetch(stage, on, image.fetch_argv("docker", stage.image, ""), image.layers)
        looked = await stage.run(on, image.look_argv(stage.container, stage.image))
        if looked.code != 0:
            raise stage.error(on.name, f"{stage.image} was fetched and is not there", looked, "docker")
    stage.complete += 1
    match = _ID.search(looked.text)  # a login on the way may print more
    return looked.text.strip() if match is None else match.group()


async def _check_disk(stage: _Stage, on: Candidate) -> None:
    """Silent where it cannot be known: then the fetch shows it."""
    root = await stage.run(on, image.docker_root_argv())
    folder = root.text.strip().splitlines()[-1] if root.code == 0 and root.text.strip() else ""
    if not folder.startswith("/"):
        return
    free = await stage.run(on, image.free_argv(folder))
    last = free.text.split()[-1] if free.code == 0 and free.text.split() else ""
    if last.isdecimal():
        _enough(stage, on.name, folder, int(last))


def _enough(stage: _Stage, node: str, folder: str, free: int) -> None:
    if free < stage.container.disk_gib * _GIB:
        raise PreflightError(
            f"the disk of {folder} on {node} has {free / _GIB:.1f} GiB free, and {stage.image} is not there yet",
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
        raise stage.error(on.name, f"{stage.image} cannot be fetched", end, argv[0])
    stage.report(f"image: {on.name} has it after {time.monotonic() - began:.0f} s")


async def _make_file(stage: _Stage, on: Candidate, file: Path) -> None:
    """Once for all nodes; one that another start makes meanwhile is made twice, and the last one stays."""
    if _is_made(stage, file):
        return
    part = file.with_name(f"{stage.folder.name}.part{file.suffix}")

    def progress(text: str) -> str:
        size = part.stat().st_size if part.exists() else 0
        lines = [line for line in text.replace("\r", "\n").splitlines() if line.strip()]
        return f"{size / _GIB:.1f} GiB written; {lines[-1].strip()[:80] if lines else 'no word yet'}"

    try:
        await _fetch(stage, on, image.fetch_argv(stage.container.kind, stage.image, str(part)), progress)
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


async def _file(stage: _Stage, on: Candidate) -> None:
    looked = await stage.run(on, image.look_argv(stage.container, stage.image))
    if looked.code == 1:
        raise PreflightError(
            f"{on.name} cannot read {stage.image}",
            where="container.image",
            todo="copy it there, or to a folder that all nodes share",
        )
    if looked.code != 0:
        raise stage.error(on.name, f"{stage.image} cannot be looked for", looked, "test")


async def _cache(stage: _Stage, on: Candidate, folder: str) -> bool:
    """Whether anything is in it. It holds code that is loaded, so it must be the user's own."""
    made = await stage.run(on, compile_cache.make_argv(folder))
    looked = await stage.run(on, compile_cache.look_argv(folder)) if made.code == 0 else made
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


def _compare(stage: _Stage, machines: Sequence[Candidate], ids: Sequence[str]) -> None:
    """A tag that has moved gives nodes that fetch at different times different images."""
    if len(set(ids)) > 1:
        raise PreflightError(
            f"the nodes have different images under {stage.image}",
            where="container.image",
            cause="the tag was moved between their pulls",
            todo="name the image by its digest (NAME@sha256:...), or docker pull it on every node",
            evidence=tuple(f"{machine.name}: {id_}" for machine, id_ in zip(machines, ids, strict=True)),
        )


async def _all(
    machines: Sequence[Candidate], work: Callable[[Candidate], Coroutine[Any, Any, ResultT]]
) -> list[ResultT]:
    """What each node gives, all at once. Once a node has failed, the others are waited for no longer than an answer
    takes: a fetch may last for an hour. Raises one PreflightError with every node that fails."""
    tasks = {machine.name: asyncio.create_task(work(machine)) for machine in machines}
    try:
        _, pending = await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_EXCEPTION)
        if pending:
            await asyncio.wait(pending, timeout=_PATIENCE_SECONDS)
        failed = {name: task for name, task in tasks.items() if task.done() and task.exception() is not None}
        if failed:
            raise _together(failed, of=len(tasks), stopped=[name for name, task in tasks.items() if not task.done()])
        return [task.result() for task in tasks.values()]
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


def _together(failed: Mapping[str, asyncio.Task[Any]], *, of: int, stopped: Sequence[str]) -> BaseException:
    """The nodes that cannot have it, as one error; a bug as it is."""
    errors = []
    for task in failed.values():
        error = task.exception()
        if not isinstance(error, PreflightError):
            assert error is not None
            return error
        errors.append(error)
    return together(
        errors,
        f"{len(errors)} of {of} nodes cannot have the container: {', '.join(failed)}",
        todo=errors[0].todo,
        also=[f"what {', '.join(stopped)} had begun was stopped"] if stopped else [],
    )
