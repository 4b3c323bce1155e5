"""What a run is for who looks at it from outside: its recorded phase, unless its launcher is gone or is not heard."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.run.directory import RunDir, beaten_since, lives, unheard
from pdserve.run.state import DeploymentState
from pdserve.system.host import is_here
from pdserve.system.procfs import is_stopped

LOST = "lost"
"""Phase of a deployment whose launcher was killed: its agents stop what it left."""
UNRESPONSIVE = "unresponsive"
"""Phase of a deployment whose launcher lives and is silent: no death is seen, no request is done."""


@dataclass(frozen=True)
class Silence:
    """Of a launcher that counts as living."""

    seconds: float | None
    """Since its last sign of life; None: there was none."""
    stopped: bool
    """Its process is seen to stand still (SIGSTOP, a debugger)."""


def silence(run: RunDir, state: DeploymentState) -> Silence | None:
    """None: it is heard. A process that stands still is seen at once, other silence once a sign of life is late."""
    if is_here(state.host, state.place) and is_stopped(state.launcher):
        return Silence(beaten_since(run), stopped=True)
    late = unheard(run)
    return None if late is None else Silence(late, stopped=False)


def phase_now(run: RunDir, state: DeploymentState) -> str:
    """The recorded phase, LOST or UNRESPONSIVE."""
    if lives(run, state):
        return state.phase if silence(run, state) is None else UNRESPONSIVE
    return state.phase if state.phase in ("stopped", "failed") else LOST
