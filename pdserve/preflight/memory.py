"""Memory and /dev/shm for the LMCache servers of ONE node, and for the KV that moves into them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from pdserve.errors import PreflightError
from pdserve.lmcache_server import check_memory
from pdserve.plan.model import LmcacheServer, Plan
from pdserve.plan.process import Process
from pdserve.preflight.finding import Finding, of_error
from pdserve.printable import size_text
from pdserve.system.host import MemoryFacts

_PLENTY = 1 << 62


def given_back(running: Plan, node: str, replaced: Collection[str]) -> tuple[LmcacheServer, ...]:
    """The LMCache servers, as they run on `node` now, that are stopped before those `replaced` (names) are started."""
    there = {process.name for process in running.processes if process.node == node}
    return tuple(server for server in running.lmcache if server.process in replaced and server.process in there)


def freed(facts: MemoryFacts, gives_back: Collection[LmcacheServer]) -> MemoryFacts:
    """The memory of a node once these servers have stopped."""
    memory, shm = sizes(gives_back)
    return replace(
        facts,
        available=facts.available + memory,
        shm_free=facts.shm_free + shm,
        limit_free=None if facts.limit_free is None else facts.limit_free + memory,
    )


def find_memory(
    plan: Plan,
    node: str,
    starting: Collection[Process],
    facts: MemoryFacts,
    gives_back: Collection[LmcacheServer] = (),
) -> list[Finding]:
    """Nothing where no LMCache server is started. `gives_back`: as of `given_back`. All that they may hold counts as
    free: on a GPU host they may hold less yet, and what fits shall not be refused."""
    names = {process.name for process in starting}
    servers = [server for server in plan.lmcache if server.process in names]
    if not servers:
        return []
    in_memory, in_shm = sizes(servers)
    memory_back, shm_back = sizes(gives_back)
    facts = freed(facts, gives_back)
    findings = []
    need, value = f"{size_text(in_memory)} for LMCache's L1", f"{size_text(facts.usable)} can be used"
    need += counted(memory_back)
    try:
        check_memory(servers, replace(facts, shm_free=_PLENTY))
        findings.append(Finding(node=node, check="memory", status="ok", value=value, need=need))
    except PreflightError as error:
        findings.append(of_error(node, "memory", need, error))
    if in_shm:
        need, value = f"{size_text(in_shm)} in /dev/shm", f"{size_text(facts.shm_free)} free in /dev/shm"
        need += counted(shm_back)
        try:
            check_memory(servers, replace(facts, available=_PLENTY, limit_free=None))
            findings.append(Finding(node=node, check="shm", status="ok", value=value, need=need))
        except PreflightError as error:
            findings.append(of_error(node, "shm", need, error))
    return findings


def sizes(servers: Collection[LmcacheServer]) -> tuple[int, int]:
    """Bytes of memory that they take, and how many of them in /dev/shm."""
    kv = sum(server.kv_bytes_on_host for server in servers)
    in_shm = sum(server.l1_bytes for server in servers if server.shm_name)
    return kv + sum(server.l1_bytes for server in servers), kv + in_shm


def counted(back: int) -> str:
    """For a message: why more is free than the node says."""
    return f" ({size_text(back)} of what is replaced counted as free)" if back else ""
