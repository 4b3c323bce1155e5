"""Memory, /dev/shm and resource limits of ONE node, for what is started there."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from pdserve.errors import PreflightError
from pdserve.lmcache_server import check_memory
from pdserve.plan.model import LmcacheServer, Plan
from pdserve.plan.process import Process
from pdserve.preflight.facts import Limit, NodeFacts
from pdserve.preflight.finding import Check, Finding, NodeNeed, Status
from pdserve.printable import size_text
from pdserve.system.host import MemoryFacts

_PLENTY = 1 << 62
_CONNECTOR_KEYS = "cpu_gib of offloading, mooncake_store.segment_gib and buffer_gib"
_LEAST_LOCKED = 1 << 30
"""Less than this no KV cache fits into; images and login shells come with 64 KiB or 8 MiB."""

ENGINE_FILES = 65535
"""vLLM 0.32 raises its own soft limit to this at start, and warns where the hard one forbids it
(vllm/utils/system_utils.py, set_ulimit)."""
PROXY_FILES = 4096
"""A request that streams holds a connection of the client and one of each engine. The proxy raises its soft limit as
far as the hard one (pd/serve/descriptors.py)."""
LEAST_FILES = 1024
"""Sockets of engine workers, shared memory and libraries: with less, vLLM's own multiprocessing runs out of them."""


def given_back(running: Plan, node: str, replaced: Collection[str]) -> tuple[LmcacheServer, ...]:
    """Return the LMCache servers that run on `node` now and stop before those `replaced` (names) are started."""
    there = {process.name for process in running.processes if process.node == node}
    return tuple(server for server in running.lmcache if server.process in replaced and server.process in there)


def find_memory(
    plan: Plan,
    node: str,
    starting: Collection[Process],
    facts: MemoryFacts,
    *,
    gives_back: Collection[LmcacheServer] = (),
    held_by_us: Collection[int] = (),
) -> list[Finding]:
    """Judge what LMCache's servers and the engines' KV connectors take; nothing where none of them takes any.

    `gives_back`: as of `given_back`. All that they may hold counts as free: on a GPU host they may hold less yet, and
    what fits shall not be refused. `held_by_us`: ports of the running deployment; an engine that holds one is replaced,
    and gives back what it has."""
    names = {process.name for process in starting}
    servers = [server for server in plan.lmcache if server.process in names]
    engines = [process for process in starting if not set(process.ports.values()) & set(held_by_us)]
    memory, shm = _sizes(gives_back)
    facts = replace(
        facts,
        available=facts.available + memory,
        shm_free=facts.shm_free + shm,
        limit_free=None if facts.limit_free is None else facts.limit_free + memory,
    )
    counted = _counted(memory), _counted(shm)
    return [*_lmcache(node, servers, facts, counted), *_connectors(plan, node, engines, servers, facts, counted)]


def _sizes(servers: Collection[LmcacheServer]) -> tuple[int, int]:
    """Return the bytes of memory that LMCache's servers take, and how many of them in /dev/shm."""
    kv = sum(server.kv_bytes_on_host for server in servers)
    in_shm = sum(server.l1_bytes for server in servers if server.shm_name)
    return kv + sum(server.l1_bytes for server in servers), kv + in_shm


def _counted(back: int) -> str:
    """Say why more is free than the node says."""
    return f" ({size_text(back)} of what is replaced counted as free)" if back else ""


def _lmcache(
    node: str, servers: Sequence[LmcacheServer], facts: MemoryFacts, counted: tuple[str, str]
) -> Iterator[Finding]:
    if not servers:
        return
    taken, in_shm = _sizes(servers)
    usable, free = f"{size_text(facts.usable)} can be used", f"{size_text(facts.shm_free)} free in /dev/shm"
    asked: list[tuple[Check, str, str, MemoryFacts]] = [
        ("memory", f"{size_text(taken)} for LMCache's L1{counted[0]}", usable, replace(facts, shm_free=_PLENTY))
    ]
    if in_shm:
        in_shm_alone = replace(facts, available=_PLENTY, limit_free=None)
        asked.append(("shm", f"{size_text(in_shm)} in /dev/shm{counted[1]}", free, in_shm_alone))
    for check, text, value, there in asked:
        need = NodeNeed(node, check, text)
        try:
            check_memory(servers, there)
            yield need.found("ok", value)
        except PreflightError as error:
            yield need.refused(error)


def _connectors(
    plan: Plan,
    node: str,
    engines: Collection[Process],
    servers: Collection[LmcacheServer],
    facts: MemoryFacts,
    counted: tuple[str, str],
) -> Iterator[Finding]:
    """Check the memory of the engines' KV connectors. The need is the sum with what LMCache's servers take."""
    total, in_shm = sum(engine.host_bytes for engine in engines), sum(engine.shm_bytes for engine in engines)
    beside, beside_in_shm = _sizes(servers)
    if total:
        need = NodeNeed(
            node, "memory", f"{size_text(total)} for the engines' KV connectors{_beside(beside)}{counted[0]}"
        )
        value = f"{size_text(facts.usable)} can be used"
        keys = f"{_CONNECTOR_KEYS}, or lmcache.l1_size_gb" if beside else _CONNECTOR_KEYS
        if total + beside <= facts.usable:
            yield need.found("ok", value)
        else:
            store = any(process.role == "mooncake-master" for process in plan.processes)
            fix = f"lower {keys}, or place fewer instances on a node"
            yield need.found("failed", value, fix, where="mooncake_store" if store else None)
    if in_shm:
        need = NodeNeed(
            node, "shm", f"{size_text(in_shm)} in /dev/shm for offloading{_beside(beside_in_shm)}{counted[1]}"
        )
        value = f"{size_text(facts.shm_free)} free in /dev/shm"
        keys = "cpu_gib of offloading or lmcache.l1_size_gb" if beside_in_shm else "cpu_gib of offloading"
        if in_shm + beside_in_shm <= facts.shm_free:
            yield need.found("ok", value)
        else:
            yield need.found("failed", value, f"lower {keys}, or enlarge /dev/shm (container: --shm-size)")


def _beside(lmcache: int) -> str:
    return f", beside {size_text(lmcache)} for LMCache" if lmcache else ""


def find_memlock(node: str, starting: Collection[Process], facts: NodeFacts) -> list[Finding]:
    """Judge the limit of locked memory, which KV that RDMA registers counts as; nothing where none is registered."""
    if all(process.rdma_devices is None for process in starting):
        return []
    need = NodeNeed(node, "memlock", "unlimited: RDMA locks the memory that it registers", unverified=True)
    limit = facts.memlock.soft
    value = "unlimited" if limit is None else f"{size_text(limit)} may be locked"
    if facts.ipc_lock:
        return [need.found("ok", f"{value} (CAP_IPC_LOCK: no limit binds)")]
    if limit is None or limit >= facts.memory_total:
        return [need.found("ok", value)]
    fix = (
        "ulimit -l unlimited where pdserve starts (docker: --ulimit memlock=-1; Slurm: LimitMEMLOCK=infinity for "
        "slurmd, and PropagateResourceLimitsExcept=MEMLOCK)"
    )
    return [need.found("failed" if limit < _LEAST_LOCKED else "warning", value, fix)]


def find_open_files(node: str, starting: Collection[Process], facts: NodeFacts) -> list[Finding]:
    """Judge the limit of open files.

    An engine and the proxy raise their own soft limit as far as the hard one; LMCache takes what it inherits."""
    limit = facts.open_files
    engines = any(process.is_engine for process in starting)
    proxy = any(process.is_proxy for process in starting)
    others = not all(process.is_engine or process.is_proxy for process in starting)
    binding = [limit.hard] * (engines or proxy) + [limit.soft] * others
    status: Status = "ok"
    if any(value is not None and value < LEAST_FILES for value in binding):
        status = "failed"
    elif (engines and _less(limit.hard, ENGINE_FILES)) or (proxy and _less(limit.hard, PROXY_FILES)):
        status = "warning"
    need = NodeNeed(
        node,
        "open-files",
        f"at least {LEAST_FILES}; better a hard limit of {ENGINE_FILES} for engines, {PROXY_FILES} for the proxy",
    )
    fix = (
        f"ulimit -n {ENGINE_FILES} where pdserve starts (docker: --ulimit nofile={ENGINE_FILES}; Slurm: "
        "LimitNOFILE for slurmd)"
    )
    return [need.found(status, _shown(limit), None if status == "ok" else fix)]


def _less(limit: int | None, than: int) -> bool:
    return limit is not None and limit < than


def _shown(limit: Limit) -> str:
    soft, hard = ("unlimited" if value is None else str(value) for value in (limit.soft, limit.hard))
    return f"soft {soft}, hard {hard}"
