"""Memory and /dev/shm for the LMCache servers of ONE node, and for the KV that moves into them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from pdserve.errors import PreflightError
from pdserve.host import MemoryFacts
from pdserve.lmcache_server import check_memory
from pdserve.plan.model import Plan, Process
from pdserve.preflight.finding import Finding, of_error

_GIB = 1 << 30
_PLENTY = 1 << 62


def find_memory(plan: Plan, node: str, starting: Collection[Process], facts: MemoryFacts) -> list[Finding]:
    """Nothing where no LMCache server is started."""
    names = {process.name for process in starting}
    servers = [server for server in plan.lmcache if server.process in names]
    if not servers:
        return []
    kv = sum(server.kv_bytes_on_host for server in servers)
    in_memory = kv + sum(server.l1_bytes for server in servers)
    in_shm = kv + sum(server.l1_bytes for server in servers if server.shm_name)
    found = []
    need, value = f"{_gib(in_memory)} for LMCache's L1", f"{_gib(facts.usable)} can be used"
    try:
        check_memory(servers, replace(facts, shm_free=_PLENTY))
        found.append(Finding(node=node, check="memory", status="ok", value=value, need=need))
    except PreflightError as error:
        found.append(of_error(node, "memory", need, error))
    if in_shm:
        need, value = f"{_gib(in_shm)} in /dev/shm", f"{_gib(facts.shm_free)} free in /dev/shm"
        try:
            check_memory(servers, replace(facts, available=_PLENTY, limit_free=None))
            found.append(Finding(node=node, check="shm", status="ok", value=value, need=need))
        except PreflightError as error:
            found.append(of_error(node, "shm", need, error))
    return found


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f} GiB"
