"""Pulls that go wrong, between two real MooncakeConnectors over the real transfer engine and side channel."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from pdserve.patches.mooncake import cpu_device
from pdserve.patches.mooncake.bootstrap import LATE_BOOTSTRAP
from tests.upstream.run import IN_RELEASE, VLLM_VERSIONS, count, on, quiet_port, verdict

if IN_RELEASE:
    import httpx
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector, mooncake_utils

    from tests.upstream import mooncake_lab
    from tests.upstream.mooncake_lab import (
        LONG,
        WATCHED,
        Engine,
        all_free,
        arrived,
        at_once,
        gone,
        prompt,
        remote_prefill,
        rest,
        slowed,
        until,
    )

CLIENTS = 25


def transfer(patched: bool) -> None:
    """Nothing goes wrong: KV arrives unchanged. Decode has half of the prompt already the second time."""
    prefill, decode = Engine("kv_producer"), Engine("kv_consumer")
    prefill.kv.copy_(torch.rand_like(prefill.kv))
    first = prompt(4)
    for number, tokens in enumerate((first, first[:64] + prompt(2))):
        prefill.prefill(f"p{number}", f"t{number}", tokens)
        decode.decode(f"d{number}", f"t{number}", tokens, prefill)
        prefill.step()
        source = prefill.lab.blocks(f"p{number}")
        assert until(arrived(decode, f"d{number}"), prefill, decode, seconds=LONG)
        source = source if len(source) == 4 else list(range(source[0], source[0] + 4))
        assert torch.equal(decode.kv[decode.lab.blocks(f"d{number}")[:4]], prefill.kv[source])
        until(lambda: not decode.lab.busy, prefill, decode, seconds=LONG)
    assert at_once(all_free(prefill, decode), prefill, decode)


def departed(patched: bool) -> None:
    """Clients leave while prefill is still computing, each with a pull of its own: they stall it until its abort
    timeout unless patched."""
    prefill, decode = Engine("kv_producer"), Engine("kv_consumer")
    began = time.monotonic()
    for number in range(CLIENTS):
        tokens = prompt(4)
        prefill.prefill(f"p{number}", f"t{number}", tokens)
        decode.decode(f"d{number}", f"t{number}", tokens, prefill)
        decode.step()
    prefill.step()
    at_once(lambda: len(prefill.worker.reqs_need_send) == CLIENTS)
    for number in range(CLIENTS):
        prefill.lab.abort(f"p{number}")
        decode.lab.abort(f"d{number}")
    next_request(prefill, decode, began, patched)
    assert at_once(all_free(prefill, decode), prefill, decode) == patched
    assert not patched or not prefill.worker.reqs_need_send, "nothing is left of them in the prefill worker"


def next_request(prefill: Any, decode: Any, began: float, patched: bool) -> None:
    """`began`: when there was no pull yet. From then on upstream's time counts: how long it took until all had left is
    a matter of the machine."""
    tokens = prompt()
    prefill.prefill("p", "t", tokens)
    decode.decode("d", "t", tokens, prefill)
    if patched:
        assert at_once(arrived(decode, "d"), prefill, decode)
    else:
        served = until(arrived(decode, "d"), prefill, decode, seconds=4 * WATCHED)
        assert not served or time.monotonic() - began > 0.9 * 2 * WATCHED
    decode.lab.abort("d")


def late_pull(patched: bool) -> None:
    """Prefill was aborted before decode asks: it is answered at once."""
    for policy, reason in (("fail", "error"), ("recompute", "length")):
        assert end_of_a_late_pull(policy, patched) == (reason if patched else None)


def end_of_a_late_pull(policy: str, patched: bool) -> Any:
    prefill, decode = Engine("kv_producer"), Engine("kv_consumer", policy=policy)
    tokens = prompt(4)
    prefill.prefill("p", "t", tokens)
    prefill.step()
    prefill.lab.abort("p")
    prefill.step()
    decode.decode("d", "t", tokens, prefill)
    decode.step()
    assert at_once(lambda: "WAITING_FOR" not in decode.lab.status("d"), prefill, decode) == patched
    if patched:
        at_once(lambda: not decode.lab.busy, prefill, decode)
    return decode.lab.finish_reasons.get("d")


def left_before_prefill(patched: bool) -> None:
    """A client leaves decode and takes its pull along, then its prefill comes after all. Its KV must not go where other
    KV is by now, and is kept for nobody."""
    prefill, decode = Engine("kv_producer"), Engine("kv_consumer")
    prefill.kv.fill_(1)
    tokens = prompt()
    decode.decode("d", "t", tokens, prefill)
    at_once(lambda: "t" in prefill.worker.reqs_need_send, decode)
    decode.lab.abort("d")
    assert at_once(all_free(decode), decode) == patched
    prefill.prefill("p", "t", tokens)
    assert at_once(gone(prefill, "p"), prefill, decode) or not patched
    time.sleep(0.1)
    assert bool(decode.kv.any()) == (not patched)


def left_during_write(patched: bool) -> None:
    """A client leaves while its KV is being written: the blocks are its own until that has ended."""
    prefill, decode = Engine("kv_producer"), Engine("kv_consumer")
    begun, go_on = slowed(prefill)
    tokens = prompt()
    prefill.prefill("p", "t", tokens)
    decode.decode("d", "t", tokens, prefill)
    at_once(begun.is_set, prefill, decode)
    decode.lab.abort("d")
    assert not until(all_free(decode), prefill, decode, seconds=0.5)
    go_on.set()
    assert until(all_free(prefill, decode), prefill, decode, seconds=LONG)


def one_of_two_fails(patched: bool) -> None:
    """Two prefill workers have a part of the KV each. One fails while the other is still writing: until both have
    ended, another request's KV would be overwritten. Before 0.30 the request waits for ever."""
    first, second, decode = Engine("kv_producer"), Engine("kv_producer"), Engine("kv_consumer")
    first.worker._send_blocks = lambda *_: -1
    begun, go_on = slowed(second)
    decode.worker._remote_agents[first.engine_id] = {0: {0: first.side_channel}, 1: {0: second.side_channel}}
    decode.worker._tp_size[first.engine_id] = 2
    tokens = prompt()
    decode.decode("d", "t", tokens, first)
    for prefill in (second, first):
        prefill.prefill("p", "t", tokens)
    at_once(begun.is_set, second, decode)
    failed = at_once(lambda: "d" in decode.lab.finish_reasons, first, decode)
    freed = until(all_free(decode), first, second, decode, seconds=WATCHED)
    go_on.set()
    if patched:
        assert (failed, freed) == (True, False)
        assert at_once(all_free(decode), first, second, decode)
    else:
        assert freed or IN_RELEASE not in ("0.30.0", "0.32.0")
        assert not failed or IN_RELEASE >= "0.30"


def stopped_by_token(patched: bool) -> None:
    """Prefill's one token is a stop token: its KV is delivered, and its client is told how it ended."""
    prefill, decode = Engine("kv_producer"), Engine("kv_consumer")
    prefill.kv.copy_(torch.rand_like(prefill.kv))
    tokens = prompt()
    prefill.prefill("p", "t", tokens, stop_token_ids=[7])
    decode.decode("d", "t", tokens, prefill)
    prefill.step()
    assert at_once(arrived(decode, "d"), prefill, decode) == patched
    assert not patched or torch.equal(decode.kv[decode.lab.blocks("d")[:2]], prefill.kv[[1, 2]])
    assert prefill.lab.finish_reasons["p"] == "stop"


def unknown_transfer(patched: bool) -> None:
    """Prefill's scheduler names a transfer that its worker has never heard of."""
    prefill = Engine("kv_producer")
    metadata = mooncake_connector.MooncakeConnectorMetadata()
    metadata.reqs_not_processed = {"never heard of"}
    done = asyncio.run_coroutine_threadsafe(prefill.worker.record_send_reqs(metadata), prefill.worker.sender_loop)
    assert type(done.exception(60)) is (type(None) if patched else KeyError)


def same_id_twice(patched: bool) -> None:
    """A list of prompts with one transfer id: the second prefill's blocks are read by no decode, and freed."""
    prefill, decode = Engine("kv_producer"), Engine("kv_consumer")
    first, two = prompt(), prompt()
    prefill.prefill("p1", "t", first)
    prefill.prefill("p2", "t", two)
    at_once(lambda: not prefill.lab.busy, prefill)
    decode.decode("d1", "t", first, prefill)
    at_once(arrived(decode, "d1"), prefill, decode)
    assert at_once(all_free(prefill), prefill, decode) == patched


def same_id_in_one_batch(patched: bool) -> None:
    """One prefill has ended and another one with its transfer id is aborted: the worker hears of both at once."""
    prefill, decode = Engine("kv_producer"), Engine("kv_consumer")
    prefill.kv.copy_(torch.rand_like(prefill.kv))
    tokens = prompt()
    prefill.prefill("p1", "t", tokens)
    prefill.step()
    source = prefill.kv[prefill.lab.blocks("p1")]
    prefill.prefill("p2", "t", prompt())
    prefill.lab.abort("p2")
    prefill.step()
    decode.decode("d", "t", tokens, prefill)
    assert at_once(arrived(decode, "d"), prefill, decode) == patched
    assert not patched or torch.equal(decode.kv[decode.lab.blocks("d")[:2]], source)


def bootstrap(patched: bool) -> None:
    """A prefill registers at a server that knows a predecessor: one that lives, one that is dead and gives way."""
    port = quiet_port()
    server = mooncake_utils.MooncakeBootstrapServer("127.0.0.1", port)
    server.start()
    old, other = socket.create_server(("127.0.0.1", 0)), quiet_port()

    def register(engine: str, address: int, rank: int = 0) -> int:
        payload = {"engine_id": engine, "dp_rank": 0, "tp_rank": rank, "pp_rank": 0}
        payload["addr"] = f"tcp://127.0.0.1:{address}"
        return httpx.post(f"http://127.0.0.1:{port}/register", json=payload, timeout=60).status_code

    def known() -> Any:
        return httpx.get(f"http://127.0.0.1:{port}/query", timeout=60).json()["0"]

    register("one", old.getsockname()[1])
    assert register("two", other) == 400
    assert known()["engine_id"] == "one"
    old.close()
    assert [register("two", other), register("two", quiet_port(), rank=1)] == [200 if patched else 400] * 2
    if patched:
        assert register("two", quiet_port()) == 200, "the same again, moved"
        assert (known()["engine_id"], sorted(known()["worker_addr"])) == ("two", ["0", "1"])


# A prefill that says nothing.


def killed(patched: bool) -> None:
    """It is stopped, which is not dead: it may write when it goes on. Then it is killed, which is noticed, and its
    address forgotten."""
    decode = Engine("kv_consumer")
    with remote_prefill() as prefill:
        decode.decode("d", "t", prompt(), prefill)
        until(lambda: bool(decode.worker._remote_agents), decode, seconds=LONG)
        rest(decode, seconds=0.2)
        prefill.stop()
        assert not until(gone(decode, "d"), decode, seconds=WATCHED)
        prefill.go_on()
        tokens = prompt()
        prefill.prefill("p2", "t2", tokens)
        decode.decode("d2", "t2", tokens, prefill)
        assert until(arrived(decode, "d2"), decode)
        decode.lab.abort("d2")
        at_once(gone(decode, "d2"), decode)
        prefill.kill()
        assert until(gone(decode, "d"), decode, seconds=30 if patched else 10) == patched
        assert (prefill.engine_id not in decode.worker._remote_agents) == patched
        if patched:
            assert at_once(all_free(decode), decode)
            assert decode.lab.finish_reasons["d"] == "error"
            decode.decode("d3", "t3", prompt(), prefill)
            assert at_once(gone(decode, "d3"), decode)


def other_peer(patched: bool) -> None:
    """Decode withdraws from a prefill without the patch: nothing is broken, and nothing is released early, because it
    may still write. One that decode rejects is pulled: there is no other way to have its KV freed. (Until 0.30
    upstream's scheduler asserts at such a pull.)"""
    decode, refused = Engine("kv_consumer"), count("mooncake-pulls", "withdrawals-refused")
    with remote_prefill() as prefill:
        tokens = prompt()
        decode.decode("d", "t", tokens, prefill)
        until(lambda: bool(decode.worker._remote_agents), decode, seconds=LONG)
        rest(decode, seconds=0.2)
        decode.lab.abort("d")
        assert not until(all_free(decode), decode, seconds=0.5)
        prefill.prefill("p", "t", tokens)
        assert until(all_free(decode), decode, seconds=LONG)
        prefill.prefill("p2", "t2", tokens)
        decode.decode("d2", "t2", tokens, prefill)
        assert until(arrived(decode, "d2"), decode, seconds=LONG)
        if patched:
            decode.reject("d3", prefill, "t3")
            rest(decode, seconds=0.3)
            assert decode.open_pulls() > 0
            prefill.prefill("p3", "t3", prompt())
            assert at_once(lambda: not decode.open_pulls(), decode)
            assert at_once(lambda: count("mooncake-pulls", "withdrawals-refused") >= refused + 2, decode)


def reconnected(patched: bool) -> None:
    """The connection breaks and both live: the answer is lost, the blocks may still be written. The pull is withdrawn
    over a new one."""
    prefill, decode = Engine("kv_producer"), Engine("kv_consumer")
    tokens = prompt()
    decode.decode("d", "t", tokens, prefill)
    at_once(lambda: "t" in prefill.worker.reqs_need_send, decode, prefill)
    mooncake_lab.cut(prefill.worker.side_channel_port)
    assert at_once(gone(decode, "d"), decode, prefill) == patched
    if patched:
        prefill.kv.fill_(1)
        prefill.prefill("p", "t", tokens)
        until(gone(prefill, "p"), prefill, decode, seconds=0.3)
        assert (decode.lab.finish_reasons["d"], bool(decode.kv.any())) == ("error", False)


# Decode's own time for an answer (0.3 s here, 60 s more than the abort timeout) ends before prefill has said any:
# without it blocks are kept until prefill has let go or is gone.


def unanswered_write(patched: bool) -> None:
    """Prefill is writing: upstream would have it overwrite another request's KV, since it reports failures."""
    prefill, decode = Engine("kv_producer"), mooncake_lab.impatient(Engine("kv_consumer"))
    begun, go_on = slowed(prefill)
    tokens = prompt()
    prefill.prefill("p", "t", tokens)
    decode.decode("d", "t", tokens, prefill)
    at_once(begun.is_set, prefill, decode)
    freed = until(all_free(decode), prefill, decode, seconds=WATCHED)
    go_on.set()
    assert freed if IN_RELEASE >= "0.30" and not patched else not freed or not patched
    assert at_once(all_free(decode), prefill, decode) or not patched


@on(*VLLM_VERSIONS)
def test_pulls_that_go_wrong_end_with_the_patches_and_not_without() -> None:
    mooncake_lab.prepare_remote_prefills(4)
    with pytest.raises(RuntimeError, match="accelerator"):
        Engine("kv_consumer")
    cpu_device.apply()
    mooncake_lab.without_and_with(
        *(transfer, departed, late_pull, left_before_prefill, left_during_write, one_of_two_fails),
        *(stopped_by_token, unknown_transfer, same_id_twice, same_id_in_one_batch, bootstrap),
        *(killed, other_peer, reconnected, unanswered_write),
        counted=(
            *("stopped-kept", "transfers-aborted", "waiting-pulls-answered", "pulls-answered-at-once"),
            *("transfers-withdrawn", "unwanted-freed", "pulls-withdrawn", "withdrawals-refused", "pulls-failed"),
            *("peers-lost", "registrations-replaced"),
        ),
        together=4,
    )


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
    port, pauses = quiet_port(), list[float]()
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
