"""Patch mooncake-pulls: decode does not wait for KV that cannot come, nor release blocks that may be written.

Three ends of a pull that upstream does not see: its request is aborted, its prefill dies, or prefill's answer leaves
it out. Every pull ends here: by prefill's answer, by a withdrawal, or with its prefill.

A request's blocks belong to its pull until every prefill worker that was asked has settled it: delivered, refused, or
died. Before, none of them may be released, whatever has become of the request (vllm 0.33 counts like this; 0.30 to
0.32 release at the first failure, earlier versions never). All of this happens in the worker's receiver loop. The
scheduler's half names the requests whose pulls are to be withdrawn.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import queue
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pdserve.patches import effects
from pdserve.patches.mooncake import sockets
from pdserve.patches.mooncake.peer import refuses_connections, watch
from pdserve.patches.mooncake.withdrawals import Lines, WithdrawalResult
from pdserve.patches.patch import Patch, PatchTarget, wrap

NAME = "mooncake-pulls"
"""The patch that all of this belongs to."""


@dataclass
class OpenPull:
    """One request's pull, from all the prefill workers that have a part of its KV."""

    meta: Any
    """Upstream's PullReqMeta."""
    peers_left: int | None = None
    """None: no prefill worker was asked yet."""
    withdrawn: bool = False
    """Its request has ended: only its blocks are waited for."""
    failed: bool = False

    @property
    def has_blocks(self) -> bool:
        """Tell whether there are any. Without them it only makes prefill free its own; no request waits for it."""
        return any(self.meta.local_block_ids)


class Peer:
    """One prefill worker that was asked for a batch of requests."""

    def __init__(self, address: str, batch: dict[str, Any]) -> None:
        self.address = address
        self.batch = PeerPulls(batch, self)
        self.unsettled = set(batch)
        self.asked = False
        """Before, it cannot write."""
        self.starved = False
        """There was no socket to ask it with."""
        self.lost = False
        self.answered = False
        """Its last answer has come; what that leaves out is not written."""
        self.over = asyncio.Event()
        """Lost, or all is settled: no answer is of interest any more."""
        self.tasks: set[asyncio.Task[Any]] = set()

    def ask(self) -> bool:
        """Begin to ask for what is left of the batch: its turn has come. False: nothing is left."""
        self.batch = PeerPulls(
            {request: self.batch[request] for request in self.batch if request in self.unsettled}, self
        )
        self.asked = bool(self.batch)
        return self.asked

    def close(self) -> None:
        for task in self.tasks:
            task.cancel()


class PeerPulls(dict[str, Any]):
    """The pulls of one peer, by request: upstream's coroutine passes it on, so that an answer has its peer."""

    def __init__(self, pulls: dict[str, Any], peer: Peer) -> None:
        super().__init__(pulls)
        self.peer = peer

    def copy(self) -> PeerPulls:
        return PeerPulls(self, self.peer)


class OpenPulls:
    """All open pulls of one decode worker."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._pulls: dict[str, OpenPull] = {}
        self._peers: set[Peer] = set()
        self._failed_blocks: queue.SimpleQueue[set[int]] = queue.SimpleQueue()
        sockets.widen(worker.async_zmq_ctx)
        self.lines = Lines(worker, NAME)
        self.turns = asyncio.Semaphore(sockets.pulls_at_once(worker.async_zmq_ctx))
        """The pulls beyond this number wait, in order, and have no sockets."""

    @classmethod
    def of(cls, worker: Any) -> OpenPulls:
        pulls: OpenPulls | None = getattr(worker, "pdserve_pulls", None)
        if pulls is None:
            pulls = worker.pdserve_pulls = cls(worker)
        return pulls

    def register(self, metas: dict[str, Any]) -> None:
        for request, meta in metas.items():
            self._pulls[request] = OpenPull(meta)

    def asked(self, metas: dict[str, Any]) -> None:
        """Hear that upstream has started to ask `pull_tasks_count` peers for each of these."""
        for request, meta in metas.items():
            if request in self._pulls:
                self._pulls[request].peers_left = meta.pull_tasks_count

    def unasked(self, metas: Iterable[str]) -> list[str]:
        pulls = {request: self._pulls.get(request) for request in metas}
        return [request for request, pull in pulls.items() if pull is not None and pull.peers_left is None]

    def is_wanted(self, request: str) -> bool:
        """Tell whether a request waits for its KV; else prefill only has to free its own."""
        pull = self._pulls.get(request)
        return pull is not None and pull.has_blocks and not pull.withdrawn

    def open_peer(self, address: str, metas: dict[str, Any]) -> Peer:
        """Begin with a peer, without the pulls that were withdrawn before it was asked: these are settled."""
        batch = {}
        for request, meta in metas.items():
            pull = self._pulls.get(request)
            if pull is None:
                continue
            if pull.withdrawn:
                self._settled(request, pull)
            else:
                batch[request] = meta
        peer = Peer(address, batch)
        self._peers.add(peer)
        return peer

    def close_peer(self, peer: Peer) -> None:
        peer.close()
        self._peers.discard(peer)

    def is_withdrawn(self, request: str) -> bool:
        pull = self._pulls.get(request)
        return pull is None or pull.withdrawn

    def withdraw(self, requests: Iterable[str]) -> Iterator[tuple[Peer, dict[str, str]]]:
        """Mark pulls whose requests have ended; the peers to notify, with request -> transfer id."""
        to_notify: dict[Peer, dict[str, str]] = {}
        for request in requests:
            pull = self._pulls.get(request)
            if pull is None or pull.withdrawn:
                continue
            pull.withdrawn = True
            if not pull.peers_left:
                self._end(request, pull)
                continue
            for peer in self._peers:
                if request in peer.unsettled:
                    to_notify.setdefault(peer, {})[request] = pull.meta.transfer_id
                    if not peer.asked:
                        self.settle(peer, request, failed=False)
        yield from to_notify.items()

    def transfers(self, peer: Peer) -> dict[str, str]:
        """Return what a peer has not settled, request -> transfer id."""
        return {request: peer.batch[request].transfer_id for request in peer.unsettled if request in peer.batch}

    def settle(self, peer: Peer, request: str, *, failed: bool) -> None:
        """Note that this peer will not write for this request again."""
        if request not in peer.unsettled:
            return
        peer.unsettled.discard(request)
        if not peer.unsettled:
            peer.over.set()
        pull = self._pulls.get(request)
        if pull is not None:
            pull.failed = pull.failed or failed
            self._settled(request, pull)

    def fail(self, peer: Peer | None, request: str) -> None:
        """Note that a request's KV will not come from this peer; None: no peer could be asked."""
        if peer is not None:
            self.settle(peer, request, failed=True)
            return
        pull = self._pulls.get(request)
        if pull is not None:
            pull.failed = True
            self._end(request, pull)

    @property
    def can_report(self) -> bool:
        """Tell whether the scheduler can fail the load of a request that still wants it.

        Before 0.30 it takes ids of blocks, and only for models with one group of KV layers.
        """
        return hasattr(self._worker, "_handle_failed_recv") or len(self._worker.kv_cache_config.kv_cache_groups) == 1

    def report(self, request: str) -> None:
        """Report a request's blocks as failed, once, where upstream does not (before 0.30). This must come before
        `fail`."""
        pull = self._pulls[request]
        if pull.has_blocks and not pull.failed and self.can_report:
            self._worker.xfer_stats.record_failed_recv()
            self._failed_blocks.put({block for group in pull.meta.local_block_ids for block in group})

    def take_failed_blocks(self) -> set[int]:
        """Return the blocks that have failed since the last call. This is for the worker's own thread."""
        blocks: set[int] = set()
        while not self._failed_blocks.empty():
            blocks |= self._failed_blocks.get_nowait()
        return blocks

    def _settled(self, request: str, pull: OpenPull) -> None:
        pull.peers_left = max(0, (pull.peers_left or 0) - 1)
        if pull.peers_left:
            # Upstream may have added it at the first failure.
            self._worker.finished_recving_reqs.discard(request)
        else:
            self._end(request, pull)

    def _end(self, request: str, pull: OpenPull) -> None:
        """End a pull: no peer may write any more. The scheduler hears once of a request that waits."""
        finished: set[str] = self._worker.finished_recving_reqs
        if not pull.has_blocks:
            finished.discard(request)
        elif pull.failed and not pull.withdrawn and not self.can_report:
            # To call it received would be a wrong answer. Its blocks are free as soon as the request is given up.
            pull.peers_left = 0
            return
        else:
            finished.add(request)
        del self._pulls[request]


SETTLE_SECONDS = 1.0
"""After a prefill has died. What it sent lies in the buffers of this host, and the transfer engine's own threads (or
the network adapter) still write it: until then the blocks must not become another request's."""

_LOOK_SECONDS = 1.0
"""Between two looks whether a prefill that does not answer is still there."""

_Async = Callable[..., Coroutine[Any, Any, None]]

log = logging.getLogger("pdserve.patches")
_asking: contextvars.ContextVar[tuple[Any, Peer] | None] = contextvars.ContextVar("asking", default=None)
"""Worker and peer of the pull that this task makes."""


def _send_withdrawals(original: Callable[..., None]) -> Callable[..., None]:
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


def _register_pulls(original: _Async) -> _Async:
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


def _fail_unknown_engine(original: _Async) -> _Async:
    async def handle_new_engine_id(self: Any, remote_engine_id: str, pull_metas: dict[str, Any]) -> None:
        (error,) = await asyncio.gather(original(self, remote_engine_id, pull_metas), return_exceptions=True)
        _not_asked(self, remote_engine_id, pull_metas, error)

    return handle_new_engine_id


def _note_asked(original: Callable[..., None]) -> Callable[..., None]:
    def receive_kv(self: Any, remote_engine_id: str, pull_metas: dict[str, Any]) -> None:
        original(self, remote_engine_id, pull_metas)
        OpenPulls.of(self).asked(pull_metas)

    return receive_kv


def _watch_pull(original: _Async) -> _Async:
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
    """Withdraw from a peer all that it was asked for. Returns when it has let go of that, refuses connections, or does
    not take withdrawals."""
    withdrawal = _start_withdrawal(worker, peer, OpenPulls.of(worker).transfers(peer))
    while not withdrawal.done():
        await asyncio.wait({withdrawal}, timeout=_LOOK_SECONDS)
        if not withdrawal.done() and await refuses_connections(peer.address):
            peer.lost = True
            return


def _forget_address(worker: Any, address: str) -> None:
    """Forget an address, or every later pull from an engine that keeps its id over a restart would go there."""
    for engine, ranks in list(worker._remote_agents.items()):
        if any(address in stages.values() for stages in ranks.values()):
            del worker._remote_agents[engine]


def _monitor_sockets(original: Callable[..., Any]) -> Callable[..., Any]:
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
    """Take the answer to a withdrawal. A prefill without the patch refuses, and its pull ends as upstream ends it."""
    result = await answer
    if result is WithdrawalResult.REFUSED:
        effects.count(NAME, "withdrawals-refused")
    elif result is WithdrawalResult.GONE:
        peer.lost = True
        peer.over.set()
    else:
        _fail(worker, peer, transfers, "the connection to prefill broke during the pull")


def _settle_answered(original: Callable[..., None]) -> Callable[..., None]:
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


def _fail_open(original: Callable[..., None]) -> Callable[..., None]:
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


def _add_failed_blocks(original: Callable[..., set[int]]) -> Callable[..., set[int]]:
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
    """Report each failed pull to the scheduler unless it was withdrawn: upstream does so from vllm 0.30 on."""
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


_MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector"
_WORKER = f"{_MODULE}.MooncakeConnectorWorker"
_SCHEDULER = f"{_MODULE}.MooncakeConnectorScheduler"


def apply() -> None:
    """Wraps both halves of MooncakeConnector's decode side."""
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as upstream

    scheduler, worker = upstream.MooncakeConnectorScheduler, upstream.MooncakeConnectorWorker
    wrap(scheduler, "build_connector_meta", patch=NAME, around=_name_withdrawn)
    wrap(scheduler, "request_finished", patch=NAME, around=_note_ended)
    wrap(worker, "start_load_kv", patch=NAME, around=_send_withdrawals)
    wrap(worker, "_start_load_kv", patch=NAME, around=_register_pulls)
    wrap(worker, "handle_new_engine_id", patch=NAME, around=_fail_unknown_engine)
    wrap(worker, "receive_kv", patch=NAME, around=_note_asked)
    wrap(worker, "receive_kv_from_single_worker", patch=NAME, around=_watch_pull)
    wrap(worker, "process_pulling_result", patch=NAME, around=_settle_answered)
    wrap(upstream, "make_zmq_socket", patch=NAME, around=_monitor_sockets)
    if hasattr(worker, "_handle_failed_recv"):
        wrap(worker, "_handle_failed_recv", patch=NAME, around=_fail_open)
    else:
        wrap(upstream.MooncakeConnector, "get_block_ids_with_load_errors", patch=NAME, around=_add_failed_blocks)


# --- the scheduler: which requests' pulls are to be withdrawn


def _name_withdrawn(original: Callable[..., Any]) -> Callable[..., Any]:
    def build_connector_meta(self: Any, scheduler_output: Any) -> Any:
        meta = original(self, scheduler_output)
        pulling, ended = _scheduler_pulls(self)
        for pulls in meta.reqs_to_recv.values():
            pulling.update(request for request, pull in pulls.items() if any(pull.local_block_ids))
        if ended:
            # Upstream's metadata is pickled for the workers whole; one without the patch does not look at this.
            meta.pdserve_withdrawn = frozenset(ended)
            ended.clear()
        return meta

    return build_connector_meta


def _note_ended(original: Callable[..., tuple[bool, Any]]) -> Callable[..., tuple[bool, Any]]:
    def request_finished(self: Any, request: Any, block_ids: Any) -> tuple[bool, Any]:
        from vllm.v1.request import RequestStatus

        pulling, ended = _scheduler_pulls(self)
        request_id = request.request_id
        _, planned = self._reqs_need_recv.get(request_id, (None, ()))
        if request_id in pulling or any(planned):
            pulling.discard(request_id)
            # After any other end its KV has long arrived; the worker ignores what it has no pull for.
            if request.status in (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR):
                ended.add(request_id)
        return original(self, request, block_ids)

    return request_finished


def _scheduler_pulls(scheduler: Any) -> tuple[set[str], set[str]]:
    """Return the requests that were given to the workers to pull and have not ended; those that have, since the last
    step."""
    pulls: tuple[set[str], set[str]] | None = getattr(scheduler, "pdserve_pulls", None)
    if pulls is None:
        pulls = scheduler.pdserve_pulls = (set(), set())
    return pulls


PATCH = Patch(
    name=NAME,
    behaviour="abandoned transfers",
    summary=(
        "A decode request whose KV cannot come (client gone, prefill dead or without an answer) holds its blocks for "
        "the abort timeout and 60 s, before vllm 0.30 for ever. Its pull is withdrawn or failed at once; its blocks "
        "are released when no prefill worker can write them any more, not before. A rejected request is no pull that "
        "waits at prefill and holds a socket: its transfer is withdrawn. Pulls beyond what the sockets allow wait."
    ),
    issue="https://github.com/vllm-project/vllm/issues/35943",
    targets=(
        PatchTarget(f"{_SCHEDULER}.build_connector_meta", body=True),
        PatchTarget(f"{_SCHEDULER}.request_finished", body=True),
        PatchTarget(f"{_WORKER}.start_load_kv", body=True),
        PatchTarget(f"{_WORKER}._start_load_kv", body=True),
        PatchTarget(f"{_WORKER}.handle_new_engine_id", body=True),
        PatchTarget(f"{_WORKER}.receive_kv", body=True),
        PatchTarget(f"{_WORKER}.receive_kv_from_single_worker", body=True),
        PatchTarget(f"{_WORKER}.process_pulling_result", body=True),
        PatchTarget(f"{_WORKER}._handle_failed_recv", body=True, only=">=0.30"),
        PatchTarget(
            "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1.get_block_ids_with_load_errors",
            only="<0.30",
        ),
        PatchTarget("vllm.utils.network_utils.make_zmq_socket"),
    ),
    runs_in=("engine-core", "worker"),
    connectors=frozenset({"MooncakeConnector"}),
    required=True,
    serves_without=(
        "a decode request whose client or prefill is gone holds its blocks for timeouts.transfer_abort_seconds, and "
        "on vllm before 0.30 for ever"
    ),
    effects={
        "pulls-withdrawn": "pulls of ended requests that were withdrawn from prefill",
        "withdrawals-refused": "withdrawals that a prefill without the patch did not understand",
        "pulls-failed": "pulls that failed, so that their requests stopped waiting",
        "peers-lost": "times that a prefill worker was gone while it was pulled from",
        "transfers-released": "transfers without a pull that prefill was made to free",
        sockets.OUT_OF_SOCKETS: sockets.HELP,
    },
    remove_when="upstream withdraws the pulls of aborted requests and notices that a prefill is gone",
    apply=apply,
)
