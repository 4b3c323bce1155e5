"""The name that every process of ours carries in its environment, and what it proves.

    PDSERVE_PROCESS=<run id>/<token of the run>/<process>.<life>

The token is random and stands in the run's state.json and in environments of its processes only, which other users
cannot read: it is not written by hand. The life counts the starts of an agent, so that what is left of an earlier life
of a process is none of the next one. Whoever copies a whole environment copies the name too; what the kernel knows of
births is therefore asked as well, wherever it shows them.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping

from pdserve.system import procfs
from pdserve.system.procfs import Relations

MARKER = "PDSERVE_PROCESS"
"""Environment variable that every descendant inherits."""


def new_token() -> str:
    """Of a new run."""
    return secrets.token_hex(16)


def marker(run_id: str, token: str, life: str) -> str:
    """`life`: `<process>.<number>`."""
    return f"{run_id}/{token}/{life}"


def holders(run_id: str, token: str) -> set[int]:
    """Live PIDs that carry a name of the run, in one reading."""
    begin = marker(run_id, token, "").encode()
    return {pid for pid, value in procfs.environment_values(MARKER).items() if value.startswith(begin)}


def born_outside(
    pid: int,
    *,
    seen: Mapping[int, Relations],
    since: int,
    above: Collection[int] | None,
    named: Collection[int],
    ours: Collection[int],
) -> bool:
    """Whether the kernel shows that a process comes from none of ours. `since`: clock ticks when the first of ours
    began; `above`: who was above it then; None: not recorded. `named`: all that carry a name of ours; `ours`: those
    that are known without it.

    A session cannot be joined: one that began before us holds none of ours. And an orphan falls to one that was above
    its parent: another one that is its parent has started it.
    """
    if pid not in seen:
        return True  # it has ended
    leader = seen.get(seen[pid].session)
    if leader is not None and leader.start_ticks < since:
        return True
    parent = seen[pid].parent
    while parent in named and parent in seen:
        parent = seen[parent].parent
    if parent in ours or parent not in seen:
        return False
    return seen[parent].start_ticks >= since if above is None else parent not in above
