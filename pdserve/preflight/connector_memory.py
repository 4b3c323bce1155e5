"""Memory and /dev/shm that the KV connectors of the engines of ONE node take, beside LMCache's."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from pdserve.plan.model import Plan
from pdserve.plan.process import Process
from pdserve.preflight.finding import Finding
from pdserve.system.host import MemoryFacts

_GIB = 1 << 30
_KEYS = "cpu_gib of offloading, mooncake_store.segment_gib and buffer_gib"


def find_connector_memory(
    plan: Plan, node: str, starting: Collection[Process], facts: MemoryFacts, held_by_us: Collection[int]
) -> Iterator[Finding]:
    """Nothing where no engine that is started takes any. `held_by_us`: ports of the running deployment; an engine that
    holds one is replaced, and gives back what it has."""
    names = {process.name for process in starting}
    new = [process for process in starting if not set(process.ports.values()) & set(held_by_us)]
    l1 = sum(server.l1_bytes for server in plan.lmcache if server.process in names)
    total, in_shm = sum(process.host_bytes for process in new), sum(process.shm_bytes for process in new)
    if total:
        beside = f", beside {_gib(l1)} for LMCache's L1" if l1 else ""
        need = f"{_gib(total)} for the engines' KV connectors{beside}"
        fits = total + l1 <= facts.usable
        yield Finding(
            node=node,
            check="memory",
            status="ok" if fits else "failed",
            value=f"{_gib(facts.usable)} can be used",
            need=need,
            fix=None if fits else f"lower {_KEYS}, or place fewer instances on a node",
            where=None if fits else "mooncake_store" if _has_store(plan) else None,
        )
    if in_shm:
        fits = in_shm <= facts.shm_free
        yield Finding(
            node=node,
            check="shm",
            status="ok" if fits else "failed",
            value=f"{_gib(facts.shm_free)} free in /dev/shm",
            need=f"{_gib(in_shm)} in /dev/shm for offloading",
            fix=None if fits else "lower cpu_gib of offloading, or enlarge /dev/shm (container: --shm-size)",
        )


def _has_store(plan: Plan) -> bool:
    return any(process.role == "mooncake-master" for process in plan.processes)


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f} GiB"
