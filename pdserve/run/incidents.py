"""Events of a run's history that say that something went wrong: what was measured or proven meanwhile was disturbed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

INCIDENTS: Mapping[str, str] = {
    "died": "died",
    "late": "was not ready in time",
    "given_up": "did not answer and counts as dead",
    "restarting": "is being restarted",
    "bad_peer": "exchanged no KV with a new engine",
    "cache_down": "is down",
    "engine_not_back": "did not attach to its cache server again",
    "unresponsive": "did not answer",
    "out_of_sockets": "ran out of sockets or file descriptors",
    "agent_gone": "lost its agent",
    "failed": "failed",
}
"""Event -> what happened to the process or node that it names."""


def incident(event: Mapping[str, Any]) -> str | None:
    """What went wrong, by an event of the history; None: nothing did. What names no process is the deployment's."""
    what = INCIDENTS.get(event["event"])
    return None if what is None else f"{event.get('name') or event.get('node') or 'the deployment'} {what}"
