"""More pulls than there are sockets, most of them for requests that decode has rejected. On the real connector."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

from pdserve.patches.mooncake import sockets
from tests.upstream.run import IN_RELEASE, VLLM_VERSIONS, count, on

if IN_RELEASE:
    import zmq

    from tests.upstream import mooncake_lab
    from tests.upstream.mooncake_lab import LONG, Engine, all_free, arrived, at_once, gone, prompt, rest, until

REJECTED, A_STEP = 2000, 20
LIBZMQ_SOCKETS, FEW_SOCKETS = 1023, 60
"""What libzmq gives without the patches, and what stands for it. Each rejection of a step is one pull there."""


def pair(max_sockets: int | None = None) -> tuple[Any, Any]:
    """A prefill, and a decode that has pulled from it."""
    prefill, decode = Engine("kv_producer"), Engine("kv_consumer")
    if max_sockets is not None:
        decode.worker.async_zmq_ctx.set(zmq.MAX_SOCKETS, max_sockets)
    tokens = prompt()
    prefill.prefill("p0", "t0", tokens)
    decode.decode("d0", "t0", tokens, prefill)
    until(arrived(decode, "d0"), prefill, decode, seconds=LONG)
    return prefill, decode


def rejected(patched: bool) -> None:
    """Neither engine has ever scheduled them: they take no sockets from the others. In the middle a request comes that
    both take; without the patch there is no socket for it. Until 0.30 upstream's scheduler hears of a pull without a
    request, and asserts."""
    prefill, decode = pair(FEW_SOCKETS)
    before, most, served, ended = descriptors(), 0, False, False
    tokens = prompt()
    try:
        for step in range(REJECTED // A_STEP):
            for number in range(A_STEP):
                decode.reject(f"r{step}-{number}", prefill)
            decode.step()
            most = max(most, descriptors() - before)
            if step == REJECTED // A_STEP * 3 // 4:
                prefill.prefill("p", "t", tokens)
                decode.decode("d", "t", tokens, prefill)
                served = at_once(arrived(decode, "d"), prefill, decode)
        ended = at_once(lambda: not decode.open_pulls(), decode)
    except AssertionError:
        assert not patched
        return
    assert (served, ended) == (patched, patched)
    assert bool(prefill.worker.reqs_need_send) == (not patched), "at prefill, which has never heard of them"
    assert not patched or most < 20


def rejected_by_decode(patched: bool) -> None:
    """Prefill has its KV already, or will have it: nobody fetches it, and it is freed whichever is first."""
    if not patched:
        return  # its scheduler asserts as above
    prefill, decode = Engine("kv_producer"), Engine("kv_consumer")
    prefill.prefill("p1", "t1", prompt())
    at_once(lambda: not prefill.lab.busy, prefill)
    decode.reject("d1", prefill, "t1")
    assert at_once(all_free(prefill), prefill, decode)
    decode.reject("d2", prefill, "t2")
    until(lambda: not decode.open_pulls(), decode, seconds=0.3)
    prefill.prefill("p2", "t2", prompt())
    prefill.step()
    assert at_once(all_free(prefill), prefill, decode)


def more_than_at_once(patched: bool) -> None:
    """Six pulls where two may have sockets: the others wait without one. Clients of some that wait leave, and prefill
    is told all the same; then the others get their KV, in order."""
    with mock.patch.object(sockets, "pulls_at_once", return_value=2):
        prefill, decode = Engine("kv_producer"), Engine("kv_consumer")
        prompts = [prompt() for _ in range(6)]
        for number, tokens in enumerate(prompts):
            decode.decode(f"d{number}", f"t{number}", tokens, prefill)
            decode.step()
            # Those that come while prefill's address is asked for have no order.
            until(lambda: bool(decode.worker._remote_agents), decode, seconds=LONG)
        rest(decode, seconds=0.3)
    assert sorted(prefill.worker.reqs_need_send) == [f"t{number}" for number in range(2 if patched else 6)]
    if patched:
        assert all(each.worker.async_zmq_ctx.get(zmq.MAX_SOCKETS) > LIBZMQ_SOCKETS for each in (prefill, decode))
        before = decode.lab.free_blocks
        decode.lab.abort("d3", "d4")
        assert at_once(lambda: decode.lab.free_blocks == before + 4, decode)
        prefill.prefill("p3", "t3", prompts[3])
        at_once(gone(prefill, "p3"), prefill, decode)
        assert "t3" not in prefill.worker.reqs_need_send
        for number in (0, 1, 2, 5):
            prefill.prefill(f"p{number}", f"t{number}", prompts[number])
        assert at_once(lambda: not decode.lab.busy, prefill, decode)
        assert [decode.lab.finish_reasons[f"d{number}"] for number in (0, 1, 2, 5)] == ["length"] * 4


def no_descriptors(patched: bool) -> None:
    """The process has none left for a while: a pull fails at once, and later ones do not."""
    if not patched:
        return  # the scenarios without the patches run beside each other
    prefill, decode = pair()
    decode.lab.abort("d0")

    def looks() -> float:
        return count("mooncake-sends", sockets.OUT_OF_SOCKETS)

    seen = looks()
    with exhausted() as take:
        decode.decode("d", "t", prompt(), prefill)
        assert at_once(lambda: take() and decode.lab.get("d") is None, decode)
        until(lambda: take() and looks() > seen, decode, seconds=LONG)
    assert decode.lab.finish_reasons["d"] == "error"
    tokens = prompt()
    prefill.prefill("p2", "t2", tokens)
    decode.decode("d2", "t2", tokens, prefill)
    assert at_once(arrived(decode, "d2"), prefill, decode)


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@contextmanager
def exhausted() -> Iterator[Callable[[], bool]]:
    """No descriptor can be had in this process. Yields what takes those that threads of earlier scenarios have closed
    since."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 2, hard))
    taken: list[int] = []

    def take() -> bool:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        return True

    try:
        take()
        yield take
    finally:
        for number in taken:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@on(*VLLM_VERSIONS)
def test_rejected_requests_and_waiting_pulls_take_no_sockets_from_the_others() -> None:
    mooncake_lab.without_and_with(
        *(rejected, rejected_by_decode, more_than_at_once, no_descriptors),
        counted=("transfers-released", sockets.OUT_OF_SOCKETS),
    )
