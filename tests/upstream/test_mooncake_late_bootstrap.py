"""A prefill whose ranks do not start at once: the first one has the bootstrap server of all."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from pdserve.patches.mooncake.bootstrap import LATE_BOOTSTRAP
from tests.upstream.run import IN_RELEASE, VLLM_VERSIONS, on, verdict

if IN_RELEASE:
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector, mooncake_utils

    from tests.upstream.mooncake_lab import free_port

LATE = 30
"""Attempts before the server is there; with upstream's pauses five minutes."""


@on(*SpecifierSet(LATE_BOOTSTRAP.vllm).filter(VLLM_VERSIONS))
def test_a_worker_waits_for_a_first_rank_that_is_minutes_late_unless_unpatched() -> None:
    logging.disable(logging.WARNING)
    assert verdict(LATE_BOOTSTRAP) == "apply"
    in_time = register(1)
    with pytest.raises(RuntimeError, match="after 3 attempts"):
        register(LATE)
    LATE_BOOTSTRAP.apply()
    assert register(1) == in_time
    pauses = register(LATE)
    assert (len(pauses), max(pauses)) == (LATE, 10.0)


def register(late: int) -> list[float]:
    """Upstream's own method. Its pauses are counted, not waited for."""
    port, pauses = free_port(), list[float]()
    server = mooncake_utils.MooncakeBootstrapServer("127.0.0.1", port)

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == late:
            await asyncio.to_thread(server.start)

    worker: Any = SimpleNamespace(hostname="127.0.0.1", side_channel_port=1, engine_id="one", vllm_config=None)
    worker.dp_rank, worker.tp_rank, worker.pp_rank = 1, 0, 0
    mooncake_connector.asyncio = SimpleNamespace(**{**vars(asyncio), "sleep": pause})
    mooncake_connector.get_mooncake_bootstrap_addr = lambda _: ("127.0.0.1", port)
    try:
        asyncio.run(mooncake_connector.MooncakeConnectorWorker.register_worker_with_bootstrap(worker))
    finally:
        mooncake_connector.asyncio = asyncio
    assert sorted(server.workers) == [1]
    return pauses
