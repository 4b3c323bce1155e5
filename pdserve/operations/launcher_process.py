"""A launcher in this process, or in one of its own that outlives the terminal. Both run the same code."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pdserve.errors import PdserveError, ReportedError, StartError
from pdserve.launcher import Launcher
from pdserve.logs.lines import end_of, split
from pdserve.operations.client_command import ClientCommand
from pdserve.plan.environment import ENGINE_KEY
from pdserve.plan.model import Plan
from pdserve.preflight import resolve_secrets
from pdserve.reach.link import open_agent
from pdserve.run.directory import RunDir, record_errors
from pdserve.run.state import DeploymentState
from pdserve.system import procfs
from pdserve.system.process import Child, new_token, send, spawn
from pdserve.system.queued_output import queued_output
from pdserve.system.stop_signals import hear_stops, hold_stops, let_signals_interrupt, stop_signals

OnEvent = Callable[[dict[str, Any]], None]
_FOLLOW_SECONDS = 0.1
_STOPPED_EXIT = 130
"""A launcher that was asked to stop before it was ready ends with it, as `up` in the foreground does."""
_SHOWN_LINES, _SHOWN_BYTES = 12, 4096
"""So much of a launcher's log is shown when it ends without a word in the history."""


def run_here(
    run: RunDir,
    plan: Plan,
    secrets: Mapping[str, str],
    on_event: OnEvent,
    *,
    keep: bool,
    command: ClientCommand | None = None,
) -> None:
    """Run the deployment until it is asked to stop, or the command has ended. Raises StartError or ServeError after
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

    async def serve() -> None:
        launcher = Launcher(
            plan,
            run,
            state,
            secrets=secrets,
            open_agent=partial(open_agent, run_dir=run.path, run_id=run.run_id, timeouts=plan.timeouts),
            on_event=on_event,
            keep_on_failure=keep,
            began=time.monotonic(),
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
            asyncio.run(serve())
    finally:
        run.forget_key()  # also of a run that began beside another one, and was never served


def start_detached(run: RunDir, *, keep: bool) -> Child:
    """Start a launcher in a session of its own; its output goes to logs/launcher.log."""
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
    """Ask a detached launcher to stop and return once it has ended. What comes meanwhile is passed on: a Ctrl-C
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
    """Show the history of a detached launcher until the deployment is up. Raises ReportedError or StartError when it
    is not (with 130 if that was asked for elsewhere). `goes_on`: the caller has more to do, and hears itself
    a closed terminal."""
    if signal.SIGHUP in stop_signals() and not goes_on:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a launcher of its own outlives the terminal
    offset = 0
    failure: ReportedError | None = None
    stopped = False

    while True:
        ended = launcher.poll()
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


def main() -> int:
    """Entry of a detached launcher. The plan and the key are where `up` has put them."""
    parser = argparse.ArgumentParser(
        prog="python -m pdserve.operations.launcher_process", description="A detached launcher."
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--keep-on-failure", action="store_true")
    options = parser.parse_args()
    run = RunDir(options.run_dir)
    try:
        let_signals_interrupt()
        plan = run.read_plan()
        secrets = resolve_secrets(plan, os.environ, run.read_key())
        run_here(run, plan, secrets, lambda event: None, keep=options.keep_on_failure)
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
