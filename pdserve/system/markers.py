"""The name that every process of ours carries in its environment, and what it proves.

    PDSERVE_PROCESS=<run id>/<token of the run>/<process>.<life>

The token is random and stands in the run's state.json and in environments of its processes only, which other users
cannot read: it is not written by hand. The life counts the starts of an agent, so that what is left of an earlier life
of a process is none of the next one. A process that gives itself a title, as vLLM's engine core does, overwrites its
environment: it is known by its parents and its session.

Whoever copies a whole environment copies the name too. That process is left alone while a guard lives, and where
cgroups show what a run has started; else it counts as one of the run.
"""

from __future__ import annotations

import secrets

from pdserve.system import procfs

MARKER = "PDSERVE_PROCESS"
"""Environment variable that every descendant inherits."""


def new_token() -> str:
    """Of a new run."""
    return secrets.token_hex(16)


def marker(run_id: str, token: str, life: str) -> str:
    """`life`: `<process>.<number>`."""
    return f"{run_id}/{token}/{life}"


def holders(run_id: str, token: str) -> set[int]:
    """Return the live PIDs that carry a name of the run, in one reading."""
    begin = marker(run_id, token, "").encode()
    return {pid for pid, value in procfs.environment_values(MARKER).items() if value.startswith(begin)}
