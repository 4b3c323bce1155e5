"""Whether the pool of a Mooncake store has memory.

A master that was restarted has none until its engines have noticed, a second or two later; what they store before is
refused, and lost (seen with mooncake 0.3.13: "BatchPutStart failed ... insufficient space").
"""

from __future__ import annotations

import asyncio
import time

from pdserve.plan.process import HttpProbe, Process
from pdserve.reach.protocol import AskNode

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
    # With httpx, which only deployments with a store need here.
    from pdserve.observe.engine_metrics import samples_of
    from pdserve.observe.store_metrics import store_figures

    assert isinstance(master.probe, HttpProbe)
    url = f"http://{master.probe.host}:{master.probe.port}"
    answer = await ask("GET", f"{url}/metrics", seconds=_ASK_SECONDS)
    if answer.status != 200:
        return False
    try:
        size = store_figures(url, samples_of(answer.body)).bytes_total
    except ValueError:
        return True
    return size is None or size > 0
