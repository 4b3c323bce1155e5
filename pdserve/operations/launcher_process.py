"""A launcher in this process, or in one of its own that outlives the terminal. Both run the same code."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pdserve.errors import (
    CommandError,
    NotOursError,
    PdserveError,
    PreflightError,
    ReportedError,
    StartError,
    StateError,
)
from pdserve.launch.client_task import Record
from pdserve.launcher import Launcher
from pdserve.logs.lines import end_of, split
from pdserve.plan.model import Plan
from pdserve.plan.node import Node
from pdserve.preflight import ENGINE_KEY, resolve_secrets
from pdserve.reach.link import AgentLink, open_agent
from pdserve.reach.protocol import Event
from pdserve.run.directory import RunDir, record_errors
from pdserve.run.state import DeploymentState
from pdserve.system import procfs
from pdserve.system.host import is_named_here
from pdserve.system.process import Child, Exit, adopt_orphans, marker, new_token, send, spawn, spawn_attached
from pdserve.system.queued_output import queued_output
from pdserve.system.stop_signals import hear_stops, hold_stops, let_signals_interrupt, stop_signals

OnEvent = Callable[[dict[str, Any]], None]
_FOLLOW_SECONDS = 0.1
_STOPPED_EXIT = 130
"""Of a launcher that was asked to stop before it was ready; as of `up` in the foreground."""
_SHOWN_LINES, _SHOWN_BYTES = 12, 4096
"""Of a launcher's log, that are shown when it ends without a word in the history."""


def run_here(
    run: RunDir,
    plan: Plan,
    secrets: Mapping[str, str],
    on_event: OnEvent,
    *,
    keep: bool,
    began: float,
    command: ClientCommand | None = None,
) -> None:
    """Runs the deployment until it is asked to stop, or the command has ended. Raises StartError or ServeError after
    the teardown, and KeyboardInterrupt when the stop was asked for before it had become ready."""
    identity = procfs.identify(os.getpid())
    assert identity is not None
    state = DeploymentState(
        name=plan.name,
        run_id=run.run_id,
        host=socket.gethostname(),
        place=procfs.place(),
        launcher=identity,
        token=new_token(),
        started_at=time.time(),
    )

    def open_link(node: Node, receive: Callable[[Event], None]) -> AgentLink:
        try:
            return open_agent(node, run.path, run.run_id, plan.timeouts, receive)
        except OSError as error:  # its log on a full disk, or no room for a process
            raise StartError(
                f"the agent of {node.name} cannot be started",
                where=f"agent@{node.name}",
                cause=str(error),
                todo=f"make room in {run.logs}; where a limit was reached, ulimit -u and ulimit -n show it",
            ) from error

    async def main() -> None:
        launcher = Launcher(
            plan,
            run,
            state,
            secrets=secrets,
            open_agent=open_link,
            on_event=on_event,
            keep_on_failure=keep,
            began=began,
            while_ready=None if command is None else partial(command.run, plan, state, secrets[ENGINE_KEY]),
        )
        if not await launcher.run():
            raise KeyboardInterrupt

    try:
        # Outside of the lock: who reads our last lines late must not hold up the next `up`. A stop that comes once the
        # record says "starting" is for the loop, which writes the end into it.
        with queued_output(), run.only_launcher(), hold_stops():
            with record_errors(run):
                run.delete_previous_key()
                run.write(run.state, state.model_dump_json(indent=1))
                run.point_current()
            asyncio.run(main())
    finally:
        run.forget_key()  # also of a run that began beside another one, and was never served


def start_detached(run: RunDir, *, keep: bool) -> Child:
    """Starts a launcher in a session of its own; its output goes to logs/launcher.log."""
    argv = [
        sys.executable,
        "-m",
        "pdserve.operations.launcher_process",
        str(run.path),
        *(["--keep-on-failure"] if keep else []),
    ]
    return spawn(
        argv, env=os.environ, log=run.logs / "launcher.log", marker=f"{run.run_id}/launcher", control_stdin=False
    )


def end_launcher(launcher: Child) -> None:
    """Asks a detached launcher to stop and returns once it has ended. What comes meanwhile is passed on: a Ctrl-C
    ends the grace of what is stopping."""

    def pass_on(signum: int, _: object = None) -> None:
        send(launcher.identity, signal.Signals(signum))

    async def ended() -> None:
        hear_stops(pass_on)
        await launcher.wait()

    with hold_stops():
        pass_on(signal.SIGTERM)
        asyncio.run(ended())


def follow(run: RunDir, launcher: Child, on_event: OnEvent, *, keep: bool, goes_on: bool = False) -> None:
    """Shows the history of a detached launcher until the deployment is up. Raises ReportedError or StartError when it
    is not (with 130 if that was asked for elsewhere). `goes_on`: the caller has more to do, and hears itself
    a closed terminal."""
    if signal.SIGHUP in stop_signals() and not goes_on:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a launcher of its own outlives the terminal
    offset = 0
    failure: ReportedError | None = None
    stopped = False

    while True:
        ended = launcher.poll()
        state = _state_of(run)  # before the events: what it knows they hold, unless a full disk has swallowed it
        events, offset = run.read_events(offset)
        for event in events:
            on_event(event)
            if event["event"] == "up":
                return
            if event["event"] == "failed":
                failure = ReportedError(event["error"], event["exit_code"])
                if keep:
                    raise failure
            stopped = stopped or (event["event"] == "down" and event["phase"] == "stopped")
        if ended is None and state is not None and state.ready_at is not None:
            text = f"{state.name} is ready; its history lacks that (full disk?)"
            on_event({"at": time.time(), "event": "note", "text": text})
            return
        if ended is None and keep and state is not None and state.phase == "failed":
            raise failure or StartError(state.note, where=str(run.path), todo=f"pdserve status {state.name}")
        if ended is not None:
            if failure is None and (stopped or ended.code == _STOPPED_EXIT):
                raise ReportedError(_asked_to_stop(run).render(), _STOPPED_EXIT)
            log = run.logs / "launcher.log"
            last = tuple(split(end_of(log, _SHOWN_BYTES))[-_SHOWN_LINES:])
            raise failure or StartError(f"the launcher {ended}", where=str(log), todo=f"read {log}", evidence=last)
        time.sleep(_FOLLOW_SECONDS)


def _asked_to_stop(run: RunDir) -> StartError:
    return StartError(
        "it was asked to stop before it was ready",
        where=str(run.path),
        cause="`pdserve down` of this deployment, or a signal to its launcher",
        todo="the same again starts it anew",
    )


def _state_of(run: RunDir) -> DeploymentState | None:
    try:
        return run.read_state()
    except (StateError, NotOursError):
        return None


def main() -> int:
    """Entry of a detached launcher. The plan and the key are where `up` has put them."""
    parser = argparse.ArgumentParser(
        prog="python -m pdserve.operations.launcher_process", description="A detached launcher."
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--keep-on-failure", action="store_true")
    options = parser.parse_args()
    began = time.monotonic()
    run = RunDir(options.run_dir)
    try:
        let_signals_interrupt()
        plan = run.read_plan()
        secrets = resolve_secrets(plan, os.environ, run.read_key())
        run_here(run, plan, secrets, lambda event: None, keep=options.keep_on_failure, began=began)
    except PdserveError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:  # the stop was asked for, and who follows says so
        return _STOPPED_EXIT
    finally:
        run.forget_key()
    return 0


if __name__ == "__main__":
    sys.exit(main())


ENDPOINT, MODEL, API_KEY = "PDSERVE_ENDPOINT", "PDSERVE_MODEL", "PDSERVE_API_KEY"
"""Variables of the command: the proxy's URL without /v1, the name of the model, a key that the proxy takes."""
NOT_EXECUTABLE, NOT_FOUND = 126, 127
"""Exit codes, as every shell has them."""
_SIGNALLED = 128
_COLLECT_SECONDS = 1.0
_SETTLE_SECONDS = 2.0
"""From a command that has failed to its exit code: a death in the deployment that was its cause is known by then, and
is the error instead."""


class ClientCommand:
    """One command, run once at most."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        """`environ`: what it inherits. Raises CommandError when there is no such program, before anything starts."""
        self._argv = tuple(argv)
        self._environ = environ
        self._ended: Exit | None = None
        self._failure: CommandError | None = None
        if shutil.which(argv[0], path=environ.get("PATH")) is None:
            is_there = os.path.exists(argv[0]) and "/" in argv[0]  # noqa: PTH110  (a word of the command line)
            raise _cannot_run(argv[0], PermissionError() if is_there else FileNotFoundError())

    def check(self, plan: Plan) -> None:
        """Raises PreflightError when the proxy of this plan could not be reached from here."""
        node = plan.node(plan.process("proxy").node)
        if plan.proxy_place and not is_named_here(node.hostname or node.name):
            raise PreflightError(
                f"the command runs on this machine, and the proxy would listen on loopback of {node.name}",
                cause="proxy.host is a loopback address, which only processes of its own node reach",
                todo=f"type it on {node.name}, or --set proxy.host=0.0.0.0 (what guards it then: proxy.auth.keys_file)",
            )

    async def run(self, plan: Plan, state: DeploymentState, key: str, record: Record) -> None:
        """Returns when it has ended. Cancelled: it gets a TERM, and a KILL after `timeouts.stop_seconds`; cancelled
        once more: a KILL at once."""
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
    """It, and what it has left in its session."""
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
