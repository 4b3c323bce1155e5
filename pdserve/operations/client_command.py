"""The command of `pdserve run`: started when the deployment is ready, ended before it is taken down."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Mapping, Sequence

from pdserve.errors import (
    CommandError,
    PreflightError,
)
from pdserve.plan.model import Plan
from pdserve.run.state import DeploymentState
from pdserve.system.host import is_named_here
from pdserve.system.process import Child, Exit, adopt_orphans, marker, spawn_attached

ENDPOINT, MODEL, API_KEY = "PDSERVE_ENDPOINT", "PDSERVE_MODEL", "PDSERVE_API_KEY"
"""Variables of the command: the proxy's URL without /v1, the name of the model, a key that the proxy takes."""
NOT_EXECUTABLE, NOT_FOUND = 126, 127
"""Exit codes, as every shell has them."""
_SIGNALLED = 128
_COLLECT_SECONDS = 1.0
_SETTLE_SECONDS = 2.0
"""This is the pause between the failure of a command and its exit code: a death in the deployment that was its cause is
known by then, and is the error instead."""


class ClientCommand:
    """Runs one command, once at most."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        """Find the program of a command. `environ`: what the command inherits. Raises CommandError when there is no
        such program, before anything starts."""
        self._argv = tuple(argv)
        self._environ = environ
        self._ended: Exit | None = None
        self._failure: CommandError | None = None
        if shutil.which(argv[0], path=environ.get("PATH")) is None:
            is_there = os.path.exists(argv[0]) and "/" in argv[0]  # noqa: PTH110  (a word of the command line)
            raise _cannot_run(argv[0], PermissionError() if is_there else FileNotFoundError())

    def check(self, plan: Plan) -> None:
        """Check that the command can reach the proxy of a plan from here. Raises PreflightError."""
        node = plan.node(plan.process("proxy").node)
        if plan.proxy_place and not is_named_here(node.hostname or node.name):
            raise PreflightError(
                f"the command runs on this machine, and the proxy would listen on loopback of {node.name}",
                cause="proxy.host is a loopback address, which only processes of its own node reach",
                todo=f"type it on {node.name}, or --set proxy.host=0.0.0.0 (what guards it then: proxy.auth.keys_file)",
            )

    async def run(self, plan: Plan, state: DeploymentState, key: str, record: Callable[..., None]) -> None:
        """Run the command to its end. When this is cancelled, the command gets a TERM, and a KILL after
        `timeouts.stop_seconds`; when cancelled once more, a KILL at once."""
        ours = {ENDPOINT: state.endpoint, MODEL: plan.served_name, API_KEY: key}
        name = marker(state.run_id, state.token, "command.1")
        with contextlib.suppress(OSError):  # a kernel that only looks like Linux: what leaves its session is not found
            adopt_orphans()
        try:
            child = spawn_attached(self._argv, env={**self._environ, **ours}, marker=name)
        except OSError as error:
            self._failure = _cannot_run(self._argv[0], error)
            return
        state.command = child.identity
        record("command", text=f"{self._argv[0]} runs (PID {child.pid})")
        try:
            self._ended = await _end_of(child)
            record("command", text=f"{self._argv[0]} {self._ended}")
            if self._ended.code:
                await asyncio.sleep(_SETTLE_SECONDS)
        finally:
            if self._ended is None:
                record("command", text=f"{self._argv[0]} is ended, because the deployment ends before it")
            await _stop(child, plan.timeouts.stop_seconds)

    def exit_code(self) -> int:
        """Return the command's exit code, after the deployment is down; 128 + N after signal N. Raises CommandError
        when it could not be executed, and KeyboardInterrupt when a stop was asked for before its end."""
        if self._failure is not None:
            raise self._failure
        if self._ended is None or self._ended.code is None:
            raise KeyboardInterrupt
        return self._ended.code if self._ended.code >= 0 else _SIGNALLED - self._ended.code


async def _end_of(child: Child) -> Exit:
    ended = asyncio.ensure_future(child.wait())
    try:
        while not ended.done():
            await asyncio.wait({ended}, timeout=_COLLECT_SECONDS)
            child.collect_adopted()
        return ended.result()
    finally:
        ended.cancel()


async def _stop(child: Child, grace: float) -> None:
    """Stop the command, and what it has left in its session."""
    try:
        await child.stop(grace)
    except asyncio.CancelledError:
        with contextlib.suppress(asyncio.CancelledError):
            await child.stop(0)
        raise


def _cannot_run(program: str, error: OSError) -> CommandError:
    if isinstance(error, FileNotFoundError):
        return CommandError(
            f"the command cannot be executed: there is no program {program}",
            NOT_FOUND,
            cause="its name is wrong, or its folder is not in PATH",
            todo=f"correct what follows `--`; `command -v {program}` shows what a shell finds",
        )
    return CommandError(
        f"the command cannot be executed: {program}",
        NOT_EXECUTABLE,
        cause=error.strerror or "the file is there, but may not be executed",
        todo=f"chmod +x {program}, or name its interpreter (bash {program})"
        if error.errno in (None, errno.EACCES)
        else f"ldd {program} and file {program} show what it needs",
    )
