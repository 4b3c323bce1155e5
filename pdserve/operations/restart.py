"""`pdserve restart`: one process of a deployment that runs, by its launcher."""

from __future__ import annotations

import os

from pdserve.errors import ReportedError, StateError
from pdserve.plan.time_limits import restart_seconds
from pdserve.run.directory import find, has_living_launcher, home
from pdserve.run.inbox import Restart, ask


def restart(process: str, name: str | None) -> str:
    """Restart a process, and return what the launcher answers. Raises StateError, and ReportedError with the launcher's
    own exit code when the process does not come back."""
    run = find(home(os.environ), name)
    state, plan = run.read_state(), run.read_plan()
    if not has_living_launcher(run, state):
        raise StateError(f"{state.name} is not running", todo="pdserve up")
    seconds = restart_seconds(plan, process)
    reply = ask(run, Restart(name=process), seconds=seconds, alive=lambda: has_living_launcher(run, run.read_state()))
    if reply.exit_code:
        raise ReportedError(reply.message, reply.exit_code)
    return reply.message
