"""Whether the pool of a Mooncake store has memory.

A master that was restarted has none until its engines have noticed, a second or two later; what they store before is
refused, and lost (seen with mooncake 0.3.13: "BatchPutStart failed ... insufficient space").
"""

from __future__ import annotations

import asyncio
import time

from pdserve.plan.process import Process
from pdserve.reach.protocol import AskNode

_CAPACITY = "master_total_capacity_bytes"
_ASK_SECONDS = 5.0
_POLL_SECONDS = 0.2


async def wait_for_memory(master: Process, ask: AskNode, *, seconds: float) -> bool:
    """Polls the master until an engine has given memory to the pool, whatever becomes of the master meanwhile; False
    when none did in time. True also where its answer does not have it. `ask`: from its node."""
    deadline = time.monotonic() + seconds
    while not await _has_memory(master, ask):
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(_POLL_SECONDS)
    return True


async def _has_memory(master: Process, ask: AskNode) -> bool:
    from prometheus_client.parser import text_string_to_metric_families  # for deployments with a store only

    answer = await ask("GET", f"http://127.0.0.1:{master.ports['http']}/metrics", seconds=_ASK_SECONDS)
    if answer.status != 200:
        return False
    try:
        samples = [sample for family in text_string_to_metric_families(answer.body) for sample in family.samples]
    except ValueError:
        return True
    values = [sample.value for sample in samples if sample.name == _CAPACITY]
    return not values or sum(values) > 0
