"""What the steps before the first container have in common: tools on the nodes, progress, errors, all nodes at once."""

from __future__ import annotations

import asyncio
import getpass
import os
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pdserve.errors import PreflightError
from pdserve.preflight.nodes.image_faults import ImageFault, fault
from pdserve.preflight.nodes.together import together
from pdserve.reach.candidates import Candidate
from pdserve.reach.docker_hang import docker_hangs
from pdserve.reach.node_tool import ToolEnd, run_tool
from pdserve.recipe.sections import Container

Report = Callable[[str], None]
"""Gets one line for the user."""

_TOOL_SECONDS = 30.0
"""For what looks and fetches nothing: a healthy docker answers within one."""
_QUIET_SECONDS = 10.0
_TAIL_LINES = 8
_PATIENCE_SECONDS = 10.0
ResultT = TypeVar("ResultT")


@dataclass
class ContainerStage:
    """Of one start."""

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

    def error(self, node: str, what: str, end: ToolEnd, program: str, *, fetching: bool = False) -> PreflightError:
        """`fetching`: its limit was the one for the image."""
        known = fault(end.text, node=node, image=self.image, program=program, user=_user())
        lines = [line for line in end.text.splitlines() if line.strip()]
        if end.code is None:
            what += " in time"
            known = _SLOW if fetching else _hangs(program, node)
        return PreflightError(
            f"{what} on {node}",
            where=f"image@{node}",
            cause=None if known is None else known.cause,
            todo="read the log" if known is None else known.todo,
            evidence=(f"log: {self.log(node)}", *lines[-_TAIL_LINES:]),
        )


_SLOW = ImageFault("it did not end in its limit", "raise timeouts.container_seconds, or look why it is slow")


def _hangs(program: str, node: str) -> ImageFault:
    if program != "docker":
        return ImageFault(
            f"{program} gave no answer within {_TOOL_SECONDS:g} s: its disk, or the way there (ssh, srun), hangs",
            f"look on {node} whether the folder can be listed",
        )
    hint = docker_hangs(node, _TOOL_SECONDS, or_way=True)
    return ImageFault(hint.cause, hint.todo)


def _user() -> str:
    """Not every user id has a name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


async def on_all(
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
