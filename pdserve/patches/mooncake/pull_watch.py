"""MooncakeConnector's decode worker: every pull ends, by prefill's answer, by a withdrawal, or with its prefill.

Runs in the worker's receiver loop. Each function here is put around the method of MooncakeConnectorWorker that its
inner function is named after; which pulls are open is kept in mooncake_open_pulls.py.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from pdserve.patches import effects
from pdserve.patches.mooncake import sockets
from pdserve.patches.mooncake.lines import WithdrawalResult
from pdserve.patches.mooncake.open_pulls import NAME, OpenPulls, Peer
from pdserve.patches.mooncake.peer import refuses, watch

SETTLE_SECONDS = 1.0
"""After a prefill has died. What it sent lies in the buffers of this host, and the transfer engine's own threads (or
the network adapter) still write it: until then the blocks must not become another request's."""

_LOOK_SECONDS = 1.0
"""Between two looks whether a prefill that does not answer is still there."""

_Async = Callable[..., Coroutine[Any, Any, None]]

log = logging.getLogger("pdserve.patches")
_asking: contextvars.ContextVar[tuple[Any, Peer] | None] = contextvars.ContextVar("asking", default=None)
"""Worker and peer of the pull that this task makes."""


def with_withdrawals(original: Callable[..., None]) -> Callable[..., None]:
    def start_load_kv(self: Any, metadata: Any) -> None:
        original(self, metadata)
        ended = getattr(metadata, "pdserve_withdrawn", None)
        if ended and not self.is_kv_producer:
            asyncio.run_coroutine_threadsafe(_withdraw(self, ended), self.receiver_loop)

    return start_load_kv


async def _withdraw(worker: Any, requests: Collection[str]) -> None:
    for peer, transfers in OpenPulls.of(worker).withdraw(requests):
        effects.count(NAME, "pulls-withdrawn", len(transfers))
        _start_withdrawal(worker, peer, transfers)


def registered(original: _Async) -> _Async:
    async def _start_load_kv(self: Any, reqs_to_recv: dict[str, dict[str, Any]]) -> None:
        for metas in reqs_to_recv.values():
            OpenPulls.of(self).register(metas)
        # Each engine for itself: an error with one would leave the requests of the others waiting for ever.
        ended = await asyncio.gather(
            *(original(self, {engine: metas}) for engine, metas in reqs_to_recv.items()), return_exceptions=True
        )
        for (engine, metas), error in zip(reqs_to_recv.items(), ended, strict=True):
            if error is not None:
                _not_asked(self, engine, metas, error)

    return _start_load_kv


def known_or_failed(original: _Async) -> _Async:
    async def handle_new_engine_id(self: Any, remote_engine_id: str, pull_metas: dict[str, Any]) -> None:
        (error,) = await asyncio.gather(original(self, remote_engine_id, pull_metas), return_exceptions=True)
        _not_asked(self, remote_engine_id, pull_metas, error)

    return handle_new_engine_id


def asked(original: Callable[..., None]) -> Callable[..., None]:
    def receive_kv(self: Any, remote_engine_id: str, pull_metas: dict[str, Any]) -> None:
        original(self, remote_engine_id, pull_metas)
        OpenPulls.of(self).asked(pull_metas)

    return receive_kv


def watched(original: _Async) -> _Async:
    async def receive_kv_from_single_worker(self: Any, worker_addr: str, pull_metas: dict[str, Any]) -> None:
        pulls = OpenPulls.of(self)
        wanted = {request: meta for request, meta in pull_metas.items() if pulls.is_wanted(request)}
        rest = {request: meta for request, meta in pull_metas.items() if request not in wanted}
        await asyncio.gather(
            _pull_in_turn(self, pulls.open_peer(worker_addr, wanted), original),
            _release(self, worker_addr, rest, original),
        )

    return receive_kv_from_single_worker


async def _pull_in_turn(worker: Any, peer: Peer, original: _Async) -> None:
    pulls = OpenPulls.of(worker)
    if peer.unsettled:
        async with pulls.turns:
            if peer.ask():
                await _pull(worker, peer, original)
    pulls.close_peer(peer)


async def _release(worker: Any, address: str, metas: dict[str, Any], original: _Async) -> None:
    """Makes prefill free what no decode pulls: requests that were rejected, have ended, or have all of their KV here.

    Upstream pulls no blocks, which waits at prefill until that has the KV: for ever, if it has rejected the request
    too. A prefill without the patch is asked like this all the same.
    """
    if not metas:
        return
    pulls = OpenPulls.of(worker)
    peer = pulls.open_peer(address, metas)
    answer = await pulls.lines.withdraw(address, {request: meta.transfer_id for request, meta in metas.items()})
    if answer is WithdrawalResult.REFUSED:
        effects.count(NAME, "withdrawals-refused")
        await _pull_in_turn(worker, peer, original)
        return
    if answer is WithdrawalResult.GONE:
        _forget_address(worker, address)
    else:
        effects.count(NAME, "transfers-released", len(metas))
    for request in list(peer.unsettled):
        pulls.settle(peer, request, failed=False)
    pulls.close_peer(peer)


async def _pull(worker: Any, peer: Peer, original: _Async) -> None:
    loop = asyncio.get_running_loop()
    context = contextvars.copy_context()
    context.run(_asking.set, (worker, peer))
    pull = loop.create_task(original(worker, peer.address, peer.batch), context=context)
    over = loop.create_task(peer.over.wait())
    await asyncio.wait({pull, over}, return_when=asyncio.FIRST_COMPLETED)
    pull.cancel()
    over.cancel()
    error, _ = await asyncio.gather(pull, over, return_exceptions=True)
    reason = f"prefill gave no answer ({error!r})" if error is not None else "prefill's answer left them out"
    if peer.starved:
        reason = "this decode worker has no socket left to ask prefill with"
        OpenPulls.of(worker).lines.withdraw(peer.address, OpenPulls.of(worker).transfers(peer))
    elif peer.unsettled and not peer.lost and not peer.answered:
        # Upstream's own limit, or a broken socket: prefill may still write, so it is asked not to, and believed.
        reason = "prefill did not answer in time"
        await _withdrawn_or_gone(worker, peer)
    if peer.lost:
        reason = f"no process listens at {peer.address} any more"
        effects.count(NAME, "peers-lost")
        _forget_address(worker, peer.address)
        await asyncio.sleep(SETTLE_SECONDS)
    _fail(worker, peer, list(peer.unsettled), reason)


async def _withdrawn_or_gone(worker: Any, peer: Peer) -> None:
    """Returns when the peer has let go of what it was asked for, refuses connections, or does not take withdrawals."""
    withdrawal = _start_withdrawal(worker, peer, OpenPulls.of(worker).transfers(peer))
    while not withdrawal.done():
        await asyncio.wait({withdrawal}, timeout=_LOOK_SECONDS)
        if not withdrawal.done() and await refuses(peer.address):
            peer.lost = True
            return


def _forget_address(worker: Any, address: str) -> None:
    """Or every later pull from an engine that keeps its id over a restart would go to the dead address."""
    for engine, ranks in list(worker._remote_agents.items()):
        if any(address in stages.values() for stages in ranks.values()):
            del worker._remote_agents[engine]


def monitoring(original: Callable[..., Any]) -> Callable[..., Any]:
    def make_zmq_socket(*args: Any, **kwargs: Any) -> Any:
        asking = _asking.get()
        return original(*args, **kwargs) if asking is None else _monitored(*asking, lambda: original(*args, **kwargs))

    return make_zmq_socket


def _monitored(worker: Any, peer: Peer, make: Callable[[], Any]) -> Any:
    import zmq

    sock = None
    try:
        sock = make()
        _watch(worker, peer, sock)
        sockets.need_a_descriptor()
    except (zmq.ZMQError, OSError) as error:
        if sock is not None:
            sock.close()
        if sockets.is_exhaustion(error):
            peer.starved = True
            sockets.count(NAME, error)
        raise
    return sock


def _watch(worker: Any, peer: Peer, sock: Any) -> None:
    withdrawal: asyncio.Task[None] | None = None

    def lost() -> None:
        peer.lost = True
        peer.over.set()

    def reconnecting() -> None:
        nonlocal withdrawal
        if withdrawal is not None:
            withdrawal.cancel()  # its answer may have been lost with its connection
        if peer.unsettled:
            withdrawal = _start_withdrawal(worker, peer, OpenPulls.of(worker).transfers(peer))

    watch(sock, peer.address, lost=lost, reconnecting=reconnecting)


def _start_withdrawal(worker: Any, peer: Peer, transfers: dict[str, str]) -> asyncio.Task[None]:
    """Withdraws from one prefill worker; the task ends with its answer, or with the peer's pull."""
    answer = OpenPulls.of(worker).lines.withdraw(peer.address, transfers)
    # Outside of the context in which sockets are monitored.
    task = asyncio.get_running_loop().create_task(
        _answered(worker, peer, transfers, answer), context=contextvars.Context()
    )
    peer.tasks.add(task)
    task.add_done_callback(peer.tasks.discard)
    return task


async def _answered(
    worker: Any, peer: Peer, transfers: Collection[str], answer: asyncio.Future[WithdrawalResult]
) -> None:
    """A prefill without the patch refuses, and its pull ends as upstream ends it."""
    result = await answer
    if result is WithdrawalResult.REFUSED:
        effects.count(NAME, "withdrawals-refused")
    elif result is WithdrawalResult.GONE:
        peer.lost = True
        peer.over.set()
    else:
        _fail(worker, peer, transfers, "the connection to prefill broke during the pull")


def settled(original: Callable[..., None]) -> Callable[..., None]:
    def process_pulling_result(self: Any, response: Any, pull_metas: Any) -> None:
        import msgspec

        peer: Peer = pull_metas.peer
        peer.answered = response.status.name == "FINISH"
        fine = [request for request in response.ok_reqs or () if request in peer.unsettled]
        original(self, msgspec.structs.replace(response, ok_reqs=fine or None, err_reqs=None), pull_metas)
        for request in fine:
            OpenPulls.of(self).settle(peer, request, failed=False)
        _fail(self, peer, response.err_reqs or (), response.err_msg or "prefill gave no reason")

    return process_pulling_result


# --- failures


def failed(original: Callable[..., None]) -> Callable[..., None]:
    def _handle_failed_recv(self: Any, pull_metas: Any, req_ids: Collection[str], reason: str) -> None:
        pulls = OpenPulls.of(self)
        peer: Peer | None = getattr(pull_metas, "peer", None)
        if peer is not None and _asking.get() is not None and reason.startswith("transfer failed"):
            return  # no word from prefill: _pull asks it to let go first
        open_ = [request for request in req_ids if peer is None or request in peer.unsettled]
        missed = [request for request in open_ if not pulls.is_withdrawn(request)]
        effects.count(NAME, "pulls-failed", len(missed))
        original(self, pull_metas, missed, reason)
        for request in open_:
            pulls.fail(peer, request)

    return _handle_failed_recv


def with_failed_blocks(original: Callable[..., set[int]]) -> Callable[..., set[int]]:
    def get_block_ids_with_load_errors(self: Any) -> set[int]:
        return original(self) | OpenPulls.of(self.connector_worker).take_failed_blocks()

    return get_block_ids_with_load_errors


def _not_asked(worker: Any, engine: str, metas: dict[str, Any], error: BaseException | None) -> None:
    if error is not None:
        # The bootstrap server's answer about it cannot be used: ask again the next time.
        worker._remote_agents.pop(engine, None)
    requests = OpenPulls.of(worker).unasked(metas)
    _fail_at(worker, None, metas, requests, f"prefill engine {engine} cannot be asked ({error!r})")


def _fail(worker: Any, peer: Peer, requests: Collection[str], reason: str) -> None:
    _fail_at(worker, peer, peer.batch, [request for request in requests if request in peer.unsettled], reason)


def _fail_at(worker: Any, peer: Peer | None, metas: dict[str, Any], requests: list[str], reason: str) -> None:
    """Reports each to the scheduler unless it was withdrawn: upstream does so from vllm 0.30 on."""
    if not requests:
        return
    if hasattr(worker, "_handle_failed_recv"):
        worker._handle_failed_recv(metas, requests, reason)
        return
    pulls = OpenPulls.of(worker)
    missed = [request for request in requests if not pulls.is_withdrawn(request)]
    effects.count(NAME, "pulls-failed", len(missed))
    if missed:
        log.error("pulling KV for %s failed: %s", missed, reason)
    for request in missed:
        pulls.report(request)
    for request in requests:
        pulls.fail(peer, request)
