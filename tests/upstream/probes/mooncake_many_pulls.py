"""How many pulls a real decode worker can have open at once, without the patches and with them."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from tests.upstream.mooncake_lab import Engine, until  # isort: skip

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeConnectorMetadata

from pdserve.patches.mooncake import cpu_device, requests, sends
from pdserve.patches.mooncake import pulls as mooncake_pulls
from tests.upstream.probes.mooncake_flood import descriptors

PULLS = 1100
"""More than the 1,023 sockets of libzmq's default."""
LIMIT_SECONDS = 120


def pulls() -> dict[str, Any]:
    """Each for KV that prefill will never have. Prefill is in this process: its end of each connection counts too."""
    prefill, decode = Engine("kv_producer"), Engine("kv_consumer")
    before, began = descriptors(), time.monotonic()
    started: list[str] = []
    ended: list[str] = []
    receive = decode.worker.receive_kv_from_single_worker

    async def receive_kv_from_single_worker(address: str, metas: dict[str, Any]) -> None:
        started.extend(metas)
        try:
            await receive(address, metas)
        finally:
            ended.extend(metas)

    decode.worker.receive_kv_from_single_worker = receive_kv_from_single_worker
    for number in range(PULLS):
        pull = MooncakeConnectorMetadata()
        params = {
            "transfer_id": f"t{number}",
            "remote_engine_id": prefill.engine_id,
            "remote_bootstrap_addr": prefill.bootstrap,
        }
        pull.add_new_req(request_id=f"d{number}", local_block_ids=[[number % 200]], kv_transfer_params=params)
        decode.worker.start_load_kv(pull)

    asked = prefill.worker.reqs_need_send
    until(lambda: len(started) == PULLS, seconds=LIMIT_SECONDS)
    if hasattr(decode.worker, "pdserve_pulls"):  # without the patches it hears of no more than it has sender tasks
        until(lambda: len(asked) == PULLS or ended, seconds=LIMIT_SECONDS)
    return {
        "pulls": len(started),
        "open": len(started) - len(ended),
        "asked": len(asked),
        "descriptors each": round((descriptors() - before) / PULLS, 2),
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> None:
    os.environ["VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"] = "600"  # no pull ends by itself meanwhile
    cpu_device.apply()
    results = {"unpatched": pulls()}
    for patch in (requests.PATCH, sends.PATCH, mooncake_pulls.PATCH):
        patch.apply()
    results["patched"] = pulls()
    sys.stdout.flush()
    print("\n" + json.dumps(results), flush=True)
    os._exit(0)  # upstream's shutdown waits for its own sockets


if __name__ == "__main__":
    main()
