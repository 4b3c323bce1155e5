"""Memory and /dev/shm that the KV connectors of the engines of ONE node take, beside LMCache's."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from pdserve.plan.model import LmcacheServer, Plan
from pdserve.plan.process import Process
from pdserve.preflight.finding import Finding
from pdserve.preflight.memory import counted, freed, sizes
from pdserve.printable import size_text
from pdserve.system.host import MemoryFacts

_KEYS = "cpu_gib of offloading, mooncake_store.segment_gib and buffer_gib"


def find_connector_memory(
    plan: Plan,
    node: str,
    starting: Collection[Process],
    facts: MemoryFacts,
    held_by_us: Collection[int],
    gives_back: Collection[LmcacheServer] = (),
) -> Iterator[Finding]:
    """Nothing where no engine that is started takes any. The need is the sum with what LMCache's servers take.
    `held_by_us`: ports of the running deployment; an engine that holds one is replaced, and gives back what it has.
    `gives_back`: as of `find_memory`."""
    names = {process.name for process in starting}
    new = [process for process in starting if not set(process.ports.values()) & set(held_by_us)]
    beside, beside_in_shm = sizes([server for server in plan.lmcache if server.process in names])
    memory_back, shm_back = sizes(gives_back)
    facts = freed(facts, gives_back)
    total, in_shm = sum(process.host_bytes for process in new), sum(process.shm_bytes for process in new)
    if total:
        need = f"{size_text(total)} for the engines' KV connectors{_beside(beside)}{counted(memory_back)}"
        fits = total + beside <= facts.usable
        keys = f"{_KEYS}, or lmcache.l1_size_gb" if beside else _KEYS
        yield Finding(
            node=node,
            check="memory",
            status="ok" if fits else "failed",
            value=f"{size_text(facts.usable)} can be used",
            need=need,
            fix=None if fits else f"lower {keys}, or place fewer instances on a node",
            where=None if fits else "mooncake_store" if _has_store(plan) else None,
        )
    if in_shm:
        fits = in_shm + beside_in_shm <= facts.shm_free
        keys = "cpu_gib of offloading or lmcache.l1_size_gb" if beside_in_shm else "cpu_gib of offloading"
        yield Finding(
            node=node,
            check="shm",
            status="ok" if fits else "failed",
            value=f"{size_text(facts.shm_free)} free in /dev/shm",
            need=f"{size_text(in_shm)} in /dev/shm for offloading{_beside(beside_in_shm)}{counted(shm_back)}",
            fix=None if fits else f"lower {keys}, or enlarge /dev/shm (container: --shm-size)",
        )


def _beside(lmcache: int) -> str:
    return f", beside {size_text(lmcache)} for LMCache" if lmcache else ""


def _has_store(plan: Plan) -> bool:
    return any(process.role == "mooncake-master" for process in plan.processes)
