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
    """Polls the master until an engine has given memory to the pool; False when none did in time. True also where a
    master does not report it. `ask`: from its node."""
    deadline = time.monotonic() + seconds
    while (capacity := await _capacity(master, ask)) == 0:
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(_POLL_SECONDS)
    return capacity is None or capacity > 0


async def _capacity(master: Process, ask: AskNode) -> float | None:
    from prometheus_client.parser import text_string_to_metric_families  # of use once a master has died

    answer = await ask("GET", f"http://127.0.0.1:{master.ports['http']}/metrics", seconds=_ASK_SECONDS)
    if answer.status != 200:
        return None
    families = text_string_to_metric_families(answer.body)
    values = [sample.value for family in families for sample in family.samples if sample.name == _CAPACITY]
    return sum(values) if values else None
