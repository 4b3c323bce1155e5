"""The checks of this machine that `up` makes: the first thing that it lacks ends it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pdserve import host
from pdserve.lmcache_server import check_memory
from pdserve.plan.model import LmcacheServer, Plan, Process
from pdserve.preflight.files import check_model, check_programs, check_proxy_files
from pdserve.preflight.memory import freed
from pdserve.preflight.ports import check_ports


def check(
    plan: Plan,
    starting: Sequence[Process],
    held_by_us: Collection[int] = (),
    gives_back: Collection[LmcacheServer] = (),
) -> None:
    """Raises PreflightError with the first thing that this machine lacks for `starting` (processes of this node).

    `held_by_us`: ports of the running deployment itself, whose owners are stopped before they are needed again;
    `gives_back`: its LMCache servers that are (as of `given_back`).
    """
    check_model(plan)
    check_proxy_files(plan.proxy)
    check_programs(starting)
    check_ports(starting, held_by_us)
    names = {process.name for process in starting}
    servers = [server for server in plan.lmcache if server.process in names]
    check_memory(servers, freed(host.memory(), gives_back))
