"""Whether the ports of the plan are free, and who has them otherwise."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from pdserve.errors import PreflightError
from pdserve.plan.process import Process
from pdserve.system import procfs


def check_ports(starting: Iterable[Process], held_by_us: Collection[int]) -> None:
    """Raises PreflightError that names the owner of each port in use."""
    taken = [
        f"{process.name} needs port {port} ({purpose}), held by {owner}"
        for process in starting
        for purpose, port in process.ports.items()
        if port not in held_by_us and (owner := procfs.listener_owner(port)) is not None
    ]
    if taken:
        raise PreflightError(
            f"{len(taken)} port(s) of the plan are in use",
            cause="another deployment, or what is left of an earlier run",
            todo="stop the owner (pdserve list shows deployments of this user), or move ours: --set ports.KIND=PORT",
            evidence=tuple(taken),
        )
