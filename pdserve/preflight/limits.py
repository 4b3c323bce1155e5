"""Resource limits that the processes of a node inherit from its agent."""

from __future__ import annotations

from collections.abc import Collection

from pdserve.plan.process import Process
from pdserve.preflight.facts import Limit, NodeFacts
from pdserve.preflight.finding import Finding, Status
from pdserve.printable import size_text

_MIB = 1 << 20
_LEAST_LOCKED = 1024 * _MIB
"""Less than this no KV cache fits into; images and login shells come with 64 KiB or 8 MiB."""

ENGINE_FILES = 65535
"""vLLM 0.32 raises its own soft limit to this at start, and warns where the hard one forbids it
(vllm/utils/system_utils.py, set_ulimit)."""
PROXY_FILES = 4096
"""A request that streams holds a connection of the client and one of each engine. The proxy raises its soft limit as
far as the hard one (pd/serve/descriptors.py)."""
LEAST_FILES = 1024
"""Sockets of engine workers, shared memory and libraries: with less, vLLM's own multiprocessing runs out of them."""


def find_memlock(node: str, starting: Collection[Process], facts: NodeFacts) -> list[Finding]:
    """RDMA registers the KV memory, which counts as locked. Nothing where no connector wants RDMA."""
    if all(process.rdma_devices is None for process in starting):
        return []
    limit = facts.memlock.soft
    status: Status = "ok"
    if limit is not None and not facts.ipc_lock and limit < facts.memory_total:
        status = "failed" if limit < _LEAST_LOCKED else "warning"
    value = "unlimited" if limit is None else f"{size_text(limit)} may be locked"
    return [
        Finding(
            node=node,
            check="memlock",
            status=status,
            value=f"{value} (CAP_IPC_LOCK: no limit binds)" if facts.ipc_lock else value,
            need="unlimited: RDMA locks the memory that it registers",
            fix=None
            if status == "ok"
            else "ulimit -l unlimited where pdserve starts (docker: --ulimit memlock=-1; Slurm: LimitMEMLOCK=infinity "
            "for slurmd, and PropagateResourceLimitsExcept=MEMLOCK)",
            unverified_on_hardware=True,
        )
    ]


def find_open_files(node: str, starting: Collection[Process], facts: NodeFacts) -> list[Finding]:
    """An engine and the proxy raise their own soft limit as far as the hard one; LMCache takes what it inherits."""
    if not starting:
        return []
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
    return [
        Finding(
            node=node,
            check="open-files",
            status=status,
            value=_shown(limit),
            need=f"at least {LEAST_FILES}; better a hard limit of {ENGINE_FILES} for engines, {PROXY_FILES} for "
            "the proxy",
            fix=None
            if status == "ok"
            else f"ulimit -n {ENGINE_FILES} where pdserve starts (docker: --ulimit nofile={ENGINE_FILES}; Slurm: "
            "LimitNOFILE for slurmd)",
        )
    ]


def _less(limit: int | None, than: int) -> bool:
    return limit is not None and limit < than


def _shown(limit: Limit) -> str:
    soft, hard = ("unlimited" if value is None else str(value) for value in (limit.soft, limit.hard))
    return f"soft {soft}, hard {hard}"
