"""Checks an LMCache MP server at run time: its memory, and whether engines are really attached.

How it is started is the plan's business (plan/lmcache.py), its readiness the probe's (health.py), what happens
at its death the launcher's (recovery.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdserve.errors import PreflightError
from pdserve.plan.model import LmcacheServer
from pdserve.printable import size_text
from pdserve.reach.protocol import AskNode
from pdserve.system.host import MemoryFacts

_GIB = 1 << 30
_STATUS_SECONDS = 3.0
_POLL_SECONDS = 0.2
_REGISTRATION_KEYS = ("registered_gpu_ids", "registered_non_cuda_instance_ids")
"""/status of lmcache 0.5.6: lmcache_driven engines are in the first, engine_driven ones in the second."""
_META_KEYS = ("cache_context_meta", "non_cuda_context_meta")
"""What it knows of each of them."""


def check_memory(servers: Sequence[LmcacheServer], facts: MemoryFacts) -> None:
    """Check that the LMCache servers of ONE node have the memory that they need. Raises PreflightError.

    With a shared-memory name L1 lives in /dev/shm; otherwise it is ordinary memory (all of it committed at start on
    CPU, pinned step by step on GPU hosts). On CPU an lmcache_driven engine moves its KV into /dev/shm as well.
    """
    in_shm = sum(server.l1_bytes for server in servers if server.shm_name)
    in_shm += sum(server.kv_bytes_on_host for server in servers)
    in_memory = sum(server.l1_bytes for server in servers)
    in_memory += sum(server.kv_bytes_on_host for server in servers)
    if in_shm > facts.shm_free:
        raise PreflightError(
            f"LMCache and the KV that it maps need {size_text(in_shm)} in /dev/shm, "
            f"{size_text(facts.shm_free)} are free",
            where="lmcache.l1_size_gb",
            cause="too small for L1 (containers default to 64 MB), or an earlier run left segments there",
            todo="lower lmcache.l1_size_gb, enlarge /dev/shm (container: --shm-size), or leave lmcache.shm_name out",
        )
    if in_memory > facts.usable:
        limit = "" if facts.limit_free is None else f" (the cgroup allows {size_text(facts.limit_free)} more)"
        raise PreflightError(
            f"LMCache's L1 needs {size_text(in_memory)} of memory, {size_text(facts.available)} are available{limit}",
            where="lmcache.l1_size_gb",
            cause="L1 is larger than the free memory of this host; the kernel would kill it, or an engine, under load",
            todo=f"--set lmcache.l1_size_gb={max(1, int(facts.usable / _GIB * 0.6 / max(1, len(servers))))}",
        )


def registered_workers(status: Mapping[str, Any]) -> int:
    """Count the engine workers that a /status answer lists as registered, whichever side moves the bytes."""
    return sum(len(status.get(key) or ()) for key in _REGISTRATION_KEYS)


def parts_of_a_chunk(status: Mapping[str, Any]) -> int | None:
    """Return into how many objects, at least, an engine of this server cuts a chunk: one for each rank that has
    KV of its own (all ranks of a model with MLA alone have the same). LMCache counts objects. None: a /status
    without it."""
    known = [meta for key in _META_KEYS for meta in (status.get(key) or {}).values()]
    sizes = [meta["world_size"] for meta in known]
    return min(map(int, sizes), default=None)


@dataclass(frozen=True)
class Attachment:
    """Counts the engine workers that a server has, and should have."""

    server: str
    registered: int | None
    """None: its /status did not answer."""
    expected: int

    @property
    def complete(self) -> bool:
        return self.registered is not None and self.registered >= self.expected


async def attachment(server: LmcacheServer, ask: AskNode, expected: int) -> Attachment:
    """Ask a server how many engine workers are attached. An engine that only shares the port, or never registered, is
    not."""
    answer = await ask("GET", f"{server.http_url}/status", seconds=_STATUS_SECONDS)
    registered: int | None = None
    with contextlib.suppress(json.JSONDecodeError):
        registered = registered_workers(json.loads(answer.body)) if answer.status == 200 else None
    return Attachment(server.process, registered, expected)


async def wait_attached(
    servers: Sequence[LmcacheServer],
    on_node_of: Callable[[str], AskNode],
    *,
    seconds: float,
    expected: Callable[[LmcacheServer], int] = lambda server: server.expected_workers,
    clock: Callable[[], float] = time.monotonic,
) -> list[Attachment]:
    """Polls until every server has all its workers, or the time is over; returns the last answers.

    `on_node_of`: process -> a way to ask from its node, the only place where the server listens. `expected`: how many
    workers that are, asked at each look.
    """
    deadline = clock() + seconds
    while True:
        asked = (attachment(server, on_node_of(server.process), expected(server)) for server in servers)
        answers = list(await asyncio.gather(*asked))
        if all(answer.complete for answer in answers) or clock() >= deadline:
            return answers
        await asyncio.sleep(_POLL_SECONDS)
