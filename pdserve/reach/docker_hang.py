"""A docker daemon that hangs while something is awaited from one of its containers.

Its socket accepts and nothing is answered, so that a `docker run` waits for ever, without a word. A container that is
only slow to come looks the same; the daemon itself answers `docker version` at once then.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from pdserve.logs.causes import Hint
from pdserve.plan.container import docker_version_argv
from pdserve.plan.node import Reach
from pdserve.reach.node_tool import run_tool

_FIRST_SECONDS = 5.0
"""A container that comes at once needs no question."""
_EVERY_SECONDS = 10.0
_ANSWER_SECONDS = 20
"""A healthy daemon answers within one, also while it unpacks an image."""
_WAY_SECONDS = 60.0
"""For a login or a step of Slurm around it."""
_TOO_LATE = 124
"""With which timeout(1) ends when its time is over. It runs on the node: a slow way there is no fault of docker."""


async def until_docker_hangs(reach: Reach, node: str, logs: Path) -> None:
    """Returns at the latest 35 s after the daemon of a node has stopped answering, else never; it is for racing with
    what is awaited. What cannot be asked (no permission, no way there) is no hang. `logs`: the folder of the output."""
    await asyncio.sleep(_FIRST_SECONDS)
    while True:
        with contextlib.suppress(OSError):  # no way there can be run here, which is found elsewhere
            ended = await run_tool(
                reach,
                node,
                docker_version_argv(_ANSWER_SECONDS),
                log=logs / f"docker@{node}.log",
                marker=f"{logs.parent.name}/docker@{node}",
                seconds=_ANSWER_SECONDS + _WAY_SECONDS,
            )
            if ended.code == _TOO_LATE:
                return
        await asyncio.sleep(_EVERY_SECONDS)


def docker_hangs(node: str, seconds: float = _ANSWER_SECONDS, *, or_way: bool = False) -> Hint:
    """Why and what to do; `or_way`: it could be the way there as well."""
    return Hint(
        f"no answer of docker within {seconds:g} s: dockerd there hangs (it was stopped, or waits for its disk)"
        + (", or the way there (ssh, srun) does" if or_way else ""),
        f"`docker info` on {node} must answer; journalctl -u docker has why it does not, and sudo systemctl restart "
        "docker ends the hang, with every container there",
    )
