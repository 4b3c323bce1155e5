"""More pulls than there are sockets, most of them for requests that decode has rejected.

Scenarios of the probe mooncake_transfers.
"""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

from tests.upstream.mooncake_steps import LONG, all_free, arrived, prompt, rounded, soon  # isort: skip

import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeConnectorWorker

from pdserve.patches import effects
from pdserve.patches.mooncake import sockets
from tests.upstream.mooncake_lab import Engine, RemotePrefill, until

REJECTED = 2000
A_STEP = 20
FEW_SOCKETS = 60
"""Stands for libzmq's 1,023 without the patches, which raise it. Each rejection of a step is one pull there."""


def rejected() -> dict[str, Any]:
    """Neither engine has ever scheduled them. In the middle a request comes that both take."""
    try:
        return _rejected()
    except (
        AssertionError
    ):  # of upstream's scheduler until 0.30, which hears of a pull without a request: EngineCore ends
        return {"served": None, "descriptors": None, "ended": None, "kept": REJECTED}


def _rejected() -> dict[str, Any]:
    prefill, decode = Engine("kv_producer"), Engine("kv_consumer")
    decode.worker.async_zmq_ctx.set(zmq.MAX_SOCKETS, FEW_SOCKETS)
    tokens = prompt()
    prefill.prefill("p0", "t0", tokens)
    decode.decode("d0", "t0", tokens, prefill)
    until(arrived(decode, "d0"), prefill, decode, seconds=LONG)
    before, most, served = descriptors(), 0, None
    for step in range(REJECTED // A_STEP):
        for number in range(A_STEP):
            reject(decode, f"r{step}-{number}", prefill)
        decode.step()
        most = max(most, descriptors() - before)
        if step == REJECTED // A_STEP * 3 // 4:
            prefill.prefill("p", "t", tokens)
            decode.decode("d", "t", tokens, prefill)
            served = rounded(until(arrived(decode, "d"), prefill, decode, seconds=soon()))
    ended = until(lambda: not open_pulls(decode), decode, seconds=soon())
    return {
        "served": served,
        "descriptors": most,
        "ended": rounded(ended),
        "kept": len(prefill.worker.reqs_need_send),
    }


def rejected_by_decode() -> dict[str, Any] | None:
    """Prefill has its KV already, or will have it: nobody fetches it."""
    if not patched():
        return None  # its scheduler asserts as above
    prefill, decode = Engine("kv_producer"), Engine("kv_consumer")
    seen: dict[str, Any] = {}
    prefill.prefill("p1", "t1", prompt())
    until(lambda: not prefill.lab.busy, prefill, seconds=soon())
    reject(decode, "d1", prefill, "t1")
    seen["after its prefill"] = rounded(until(all_free(prefill), prefill, decode, seconds=soon()))
    reject(decode, "d2", prefill, "t2")
    until(lambda: not open_pulls(decode), decode, seconds=0.3)
    prefill.prefill("p2", "t2", prompt())
    prefill.step()
    seen["before it"] = rounded(until(all_free(prefill), prefill, decode, seconds=soon()))
    return seen


def more_than_at_once() -> dict[str, Any]:
    """Six pulls where two may have sockets. Clients of some that wait leave; then the others get their KV, in order."""
    with mock.patch.object(sockets, "pulls_at_once", return_value=2):
        prefill, decode = Engine("kv_producer"), Engine("kv_consumer")
        prompts = [prompt() for _ in range(6)]
        for number, tokens in enumerate(prompts):
            decode.decode(f"d{number}", f"t{number}", tokens, prefill)
            decode.step()
            # Those that come while prefill's address is asked for have no order.
            until(lambda: bool(decode.worker._remote_agents), decode, seconds=LONG)
        until(lambda: False, decode, seconds=0.3)
    seen: dict[str, Any] = {"asked": sorted(prefill.worker.reqs_need_send)}
    before = decode.lab.free_blocks
    decode.lab.abort("d3", "d4")
    seen["freed"] = rounded(until(lambda: decode.lab.free_blocks == before + 4, decode, seconds=soon()))
    prefill.prefill("p3", "t3", prompts[3])
    until(lambda: prefill.lab.get("p3") is None, prefill, decode, seconds=soon())
    seen["kept for it"] = "t3" in prefill.worker.reqs_need_send
    for number in (0, 1, 2, 5):
        prefill.prefill(f"p{number}", f"t{number}", prompts[number])
    served = until(lambda: not decode.lab.busy, prefill, decode, seconds=soon())
    reasons = [decode.lab.finish_reasons.get(f"d{number}") for number in (0, 1, 2, 5)]
    return {**seen, "served": rounded(served), "reasons": reasons}


def no_descriptors() -> dict[str, Any] | None:
    """The process has none left for a while."""
    if not patched():
        return None  # the scenarios without the patches run beside each other
    prefill, decode = Engine("kv_producer"), Engine("kv_consumer")
    tokens = prompt()
    prefill.prefill("p0", "t0", tokens)
    decode.decode("d0", "t0", tokens, prefill)
    until(arrived(decode, "d0"), prefill, decode, seconds=LONG)
    decode.lab.abort("d0")
    looks = ("mooncake-sends", sockets.OUT_OF_SOCKETS)
    seen = effects.totals().get(looks, 0)
    with exhausted() as take:

        def without_any(condition: Callable[[], bool]) -> Callable[[], bool]:
            def holds() -> bool:
                take()
                return condition()

            return holds

        decode.decode("d", "t", prompt(), prefill)
        ended = until(without_any(lambda: decode.lab.status("d") == "GONE"), decode, seconds=soon())
        until(without_any(lambda: effects.totals().get(looks, 0) > seen), decode, seconds=LONG)
    tokens = prompt()
    prefill.prefill("p2", "t2", tokens)
    decode.decode("d2", "t2", tokens, prefill)
    then = until(arrived(decode, "d2"), prefill, decode, seconds=soon())
    return {"ended": rounded(ended), "reason": decode.lab.finish_reasons.get("d"), "then served": rounded(then)}


def patched() -> bool:
    return hasattr(MooncakeConnectorWorker.start_load_kv, "__pdserve_patches__")


def reject(decode: Engine, name: str, prefill: Engine | RemotePrefill, transfer: str | None = None) -> None:
    """As vLLM's API server has it done for a request that it rejects: it ends before it was scheduled."""
    decode.decode(name, transfer or f"t-{name}", [1, 2, 3], prefill)
    decode.lab.abort(name)


def open_pulls(decode: Engine) -> int:
    """Upstream's tasks that wait for an answer of prefill."""
    pull = "receive_kv_from_single_worker"
    tasks = asyncio.all_tasks(decode.worker.receiver_loop)
    return sum(1 for task in tasks if getattr(task.get_coro(), "__qualname__", "").endswith(pull))


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@contextmanager
def exhausted() -> Iterator[Callable[[], None]]:
    """No descriptor can be had in this process. Yields what takes those that threads of earlier scenarios have closed
    since."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (max(int(entry.name) for entry in Path("/proc/self/fd").iterdir()) + 2, hard)
    )
    taken: list[int] = []

    def take() -> None:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))

    try:
        take()
        yield take
    finally:
        for number in taken:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
