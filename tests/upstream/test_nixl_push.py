"""Why NIXL's push mode needs the patch nixl-push: the installed vLLM without it. The library's agent is stood in for.

A test here that fails has news: upstream may have mended what the patch is for.
"""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

from pdserve.patches.scheduler import load_timeout
from tests.upstream.run import IN_RELEASE, INSTALLED_VLLM, on

if IN_RELEASE:
    from tests.upstream.nixl_lab import BLOCK_SIZE, DECODE, NIXL, PULL, Engine
    from tests.upstream.scheduler_lab import Lab

    FROM_PREFILL = {name: value for name, value in PULL.items() if name != "remote_block_ids"}

LEASE, SECONDS = 30.0, 3.0
TIMEOUT = 480.0
"""push_registration_timeout, as upstream sets it."""
FAR = 10_000.0
PUSH = {"kv_connector": "NixlPushConnector"}


def registered(**extra: Any) -> tuple[Any, int]:
    """A decode that waits for a push, and how many blocks were free before."""
    lab = Lab(block_size=BLOCK_SIZE, connector=DECODE | PUSH | {"kv_connector_extra_config": extra})
    free = lab.free_blocks
    lab.add("a", 2 * BLOCK_SIZE, FROM_PREFILL | {"remote_request_id": "a"})
    lab.step()
    return lab, free


def later(seconds: float) -> Any:
    """A `with` block in which upstream's clock is so far ahead."""
    return mock.patch.object(time, "perf_counter", return_value=time.perf_counter() + seconds)


@on(INSTALLED_VLLM)
def test_a_request_whose_push_never_comes_waits_past_upstreams_own_limit() -> None:
    lab, free = registered()
    half = lab.connector.connector_scheduler
    assert list(half._push_registration_deadlines) == ["a"]
    with later(TIMEOUT + 1):
        lab.step()
    assert not half._push_registration_deadlines
    with later(FAR):
        lab.step()
    assert lab.status("a") == "WAITING_FOR_REMOTE_KVS"
    assert lab.free_blocks < free


@on(INSTALLED_VLLM)
def test_an_abort_of_it_reaches_no_worker_and_frees_no_block() -> None:
    lab, free = registered()
    lab.abort("a")
    output = lab.schedule()
    metadata = output.kv_connector_metadata
    assert not any((metadata.push_registrations, metadata.reqs_to_recv, metadata.reqs_not_processed))
    lab.update(output)
    with later(FAR):
        lab.step()
    assert lab.status("a") == "FINISHED_ABORTED"
    assert lab.free_blocks < free


@on(INSTALLED_VLLM)
def test_load_timeout_has_it_computed_and_its_first_blocks_are_lost() -> None:
    load_timeout.apply()
    lab, free = registered(load_timeout_seconds=SECONDS)
    timeout = getattr(lab.scheduler, load_timeout.ATTRIBUTE)
    now = timeout.clock()
    for far in (FAR, 2 * FAR):
        timeout.clock = lambda far=far: now + far
        lab.step()
    for _ in range(10):
        lab.step()
    assert (lab.finish_reasons["a"], free - lab.free_blocks) == ("length", 2)


@on(INSTALLED_VLLM)
def test_a_write_that_has_waited_for_its_handshake_begins_after_the_lease_from_blocks_that_are_free() -> None:
    prefill: Any = Engine(NIXL | PUSH)
    (worker,) = prefill.workers
    prefill.prefill("a")
    blocks = prefill.lab.connector.connector_scheduler._finished_request_blocks["a"]
    prefill.step()
    with later(LEASE + 1):
        prefill.step()
        prefill.step()
    assert prefill.all_free
    written: list[str] = []
    worker._ensure_handshake = lambda *_, **__: None
    worker._xfer_blocks_for_req = lambda req_id, meta: written.append(req_id)
    registration = {"request_id": "a", "decode_engine_id": "decode-engine", "decode_host": "localhost"}
    registration |= {"decode_port": 1, "decode_tp_size": 1, "local_block_ids": blocks}  # type: ignore[dict-item]
    worker._do_start_push_kv("a", blocks, registration)
    assert written == ["a"]


@on(INSTALLED_VLLM)
def test_the_blocks_of_a_write_that_is_under_way_are_freed_when_the_lease_ends() -> None:
    prefill: Any = Engine(NIXL | PUSH)
    (worker,) = prefill.workers
    worker.nixl_wrapper.check_xfer_state = lambda _: "PROC"
    prefill.prefill("a")
    prefill.step()
    worker._sending_transfers["a"].append(7)
    with later(LEASE + 1):
        prefill.step()
        prefill.step()
    assert list(worker._sending_transfers) == ["a"]
    assert prefill.all_free
