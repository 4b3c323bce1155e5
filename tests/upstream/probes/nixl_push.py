"""Why NIXL's push mode needs the patch nixl-push: what vLLM does with a push that never comes, or comes late.

On the real Scheduler and both real halves of NixlPushConnector; the library's agent is stood in for.
"""

from __future__ import annotations

from tests.upstream.nixl_lab import BLOCK_SIZE, NIXL, Prefill, nixl_of  # isort: skip  # takes the CPU

import json
import time
from typing import Any
from unittest import mock

from pdserve.patches.scheduler import load_timeout
from tests.upstream.scheduler_lab import Lab

LEASE = 30.0
SECONDS = 3.0
STEPS = 10
"""More than the request takes to its end."""
TIMEOUT = 480.0
"""push_registration_timeout, as upstream sets it."""
FAR = 10_000.0
PUSH = NIXL | {"kv_connector": "NixlPushConnector"}
DECODE = PUSH | {"kv_role": "kv_consumer"}
PROMPT = 2 * BLOCK_SIZE
FROM_PREFILL = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "prefill-engine",
    "remote_host": "localhost",
    "remote_port": 1,
    "remote_request_id": "a",
    "tp_size": 1,
}


def registered(**extra: Any) -> tuple[Lab, int]:
    """A decode that waits for a push, and how many blocks were free before."""
    transfer = DECODE | {"kv_connector_extra_config": extra}
    lab = Lab(block_size=BLOCK_SIZE, max_num_batched_tokens=2 * PROMPT, connector=transfer)
    free = lab.free_blocks
    lab.add("a", PROMPT, dict(FROM_PREFILL))
    lab.step()
    return lab, free


def later(seconds: float) -> Any:
    """A `with` block in which upstream's clock is so far ahead."""
    return mock.patch.object(time, "perf_counter", return_value=time.perf_counter() + seconds)


def never_pushed() -> Any:
    """Prefill has died: the request after upstream's own limit, and much later."""
    lab, free = registered()
    half = lab.connector.connector_scheduler
    watched = list(half._push_registration_deadlines)
    with later(TIMEOUT + 1):
        lab.step()
    given_up = list(half._push_registration_deadlines)
    with later(FAR):
        lab.step()
    return {"watched": watched, "then": given_up, "status": lab.status("a"), "all_free": lab.free_blocks == free}


def aborted() -> Any:
    """Its client leaves: what the next metadata says to the worker of it, and what it holds."""
    lab, free = registered()
    lab.abort("a")
    output = lab.schedule()
    metadata = output.kv_connector_metadata
    informed = [metadata.push_registrations, metadata.reqs_to_recv, metadata.reqs_not_processed]
    lab.update(output)
    with later(FAR):
        lab.step()
    return {"informed": any(informed), "status": lab.status("a"), "all_free": lab.free_blocks == free}


def given_up() -> Any:
    """With the patch load-timeout: the request is computed, and its first blocks are lost."""
    load_timeout.apply()
    lab, free = registered(load_timeout_seconds=SECONDS)
    timeout = getattr(lab.scheduler, load_timeout.ATTRIBUTE)
    now = timeout.clock()
    timeout.clock = lambda: now + FAR
    lab.step()
    timeout.clock = lambda: now + 2 * FAR
    for _ in range(STEPS):
        lab.step()
    return {"computed": lab.finish_reasons.get("a"), "lost_blocks": free - lab.free_blocks}


def after_the_lease() -> Any:
    """A WRITE that has waited for its handshake while prefill's lease ended: whether it starts all the same."""
    prefill = Prefill(PUSH)
    worker = nixl_of(prefill.workers[0]).connector_worker
    prefill.prefill("a")
    blocks = prefill.lab.connector.connector_scheduler._finished_request_blocks["a"]
    prefill.step()
    with later(LEASE + 1):
        prefill.step()
        prefill.step()
    freed = prefill.lab.free_blocks == prefill.empty
    written: list[str] = []
    worker._ensure_handshake = lambda *_, **__: None
    worker._xfer_blocks_for_req = lambda req_id, meta: written.append(req_id)
    registration = {
        "request_id": "a",
        "decode_engine_id": "decode-engine",
        "decode_host": "localhost",
        "decode_port": 1,
        "decode_tp_size": 1,
        "local_block_ids": blocks,
    }
    worker._do_start_push_kv("a", blocks, registration)
    return {"all_free": freed, "written": written}


def at_the_end_of_the_lease() -> Any:
    """A WRITE that is under way when prefill's lease ends: whether its blocks stay."""
    prefill = Prefill(PUSH)
    worker = nixl_of(prefill.workers[0]).connector_worker
    worker.nixl_wrapper.check_xfer_state = lambda _: "PROC"
    prefill.prefill("a")
    prefill.step()
    worker._sending_transfers["a"].append(7)
    with later(LEASE + 1):
        prefill.step()
        prefill.step()
    return {"under_way": list(worker._sending_transfers), "all_free": prefill.lab.free_blocks == prefill.empty}


CASES = (never_pushed, aborted, given_up, after_the_lease, at_the_end_of_the_lease)


def main() -> None:
    print(json.dumps({case.__name__: case() for case in CASES}))


if __name__ == "__main__":
    main()
