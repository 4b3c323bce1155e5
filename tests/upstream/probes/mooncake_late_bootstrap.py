"""A worker of a prefill registers at the bootstrap server of its first rank, which comes late."""

from __future__ import annotations

import asyncio
import json
import logging
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector, mooncake_utils

from pdserve.installed.distributions import installed
from pdserve.patches.mooncake import late_bootstrap
from pdserve.patches.verdict import judge
from tests.upstream.mooncake_lab import free_port

LATE = 30
"""Attempts before the server is there; with upstream's pauses five minutes."""


def register(late: int) -> dict[str, Any]:
    """Upstream's own method. Its pauses are counted, not waited for."""
    port, pauses = free_port(), list[float]()
    server = mooncake_utils.MooncakeBootstrapServer("127.0.0.1", port)

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == late:
            await asyncio.to_thread(server.start)

    worker = SimpleNamespace(
        vllm_config=None, hostname="127.0.0.1", side_channel_port=1, engine_id="one", dp_rank=1, tp_rank=0, pp_rank=0
    )
    mooncake_connector.asyncio = SimpleNamespace(**{**vars(asyncio), "sleep": pause})
    mooncake_connector.get_mooncake_bootstrap_addr = lambda _: ("127.0.0.1", port)
    try:
        asyncio.run(mooncake_connector.MooncakeConnectorWorker.register_worker_with_bootstrap(worker))
    except RuntimeError as error:
        return {"error": str(error), "pauses": len(pauses)}
    finally:
        mooncake_connector.asyncio = asyncio
    return {"error": None, "pauses": len(pauses), "known": sorted(server.workers), "longest": max(pauses, default=0.0)}


def main() -> None:
    logging.disable(logging.WARNING)
    seen: dict[str, Any] = {"verdict": judge(late_bootstrap.PATCH, installed()).outcome}
    seen["unpatched"] = {"in time": register(1), "late": register(LATE)}
    late_bootstrap.PATCH.apply()
    seen["patched"] = {"in time": register(1), "late": register(LATE)}
    print("\n" + json.dumps(seen), flush=True)


if __name__ == "__main__":
    main()
