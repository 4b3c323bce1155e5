"""Patch mooncake-sends: prefill answers a pull whose KV will never come, and no waiting occupies its sender tasks.

Everything here runs in the worker's sender loop, so there are no locks; a check and the step that relies on it must
have no await between them.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from pdserve.patches import effects
from pdserve.patches.mooncake import sockets
from pdserve.patches.mooncake.withdrawals import SideChannelDecoder, Withdrawal
from pdserve.patches.patch import Patch, PatchTarget, wrap

_NAME = "mooncake-sends"
_WORKER = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector.MooncakeConnectorWorker"
_GONE = "the prefill was aborted, or decode no longer wants its KV"
_REMEMBERED_SECONDS = 600.0
"""A withdrawn id is of use until its prefill ends, and an aborted one until its pull comes. Both may be minutes away
where requests queue."""
_REMEMBERED = 500_000
"""Ids of each kind, against the memory of a flood: about 100 MB. Rejected requests name one each, and an id must not be
forgotten early because of those of others: this is 800 a second for all of that time."""

log = logging.getLogger("pdserve.patches")


def apply() -> None:
    """Wraps the side channel of MooncakeConnectorWorker and its record of the transfers that the scheduler names."""
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector

    owner = mooncake_connector.MooncakeConnectorWorker
    wrap(owner, "_mooncake_sender_listener", patch=_NAME, around=_listening)
    wrap(owner, "send_kv_to_decode", patch=_NAME, around=_in_the_background)
    wrap(owner, "record_send_reqs", patch=_NAME, around=_recorded)


class _Remembered:
    """Transfer ids that were named lately."""

    def __init__(self) -> None:
        self._ids: OrderedDict[str, float] = OrderedDict()

    def __contains__(self, transfer: str) -> bool:
        return transfer in self._ids

    def add(self, transfer: str) -> None:
        now = time.monotonic()
        self._ids[transfer] = now
        self._ids.move_to_end(transfer)
        while len(self._ids) > _REMEMBERED or next(iter(self._ids.values())) < now - _REMEMBERED_SECONDS:
            self._ids.popitem(last=False)

    def discard(self, transfer: str) -> None:
        self._ids.pop(transfer, None)


class _Sends:
    """The knowledge of one prefill worker beyond upstream's reqs_need_send."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.aborted = _Remembered()
        """By prefill's scheduler. A later prefill of the same id revives it."""
        self.unwanted = _Remembered()
        """By decode. Its KV is freed as soon as there is some."""
        self.asked: Counter[str] = Counter()
        """Pulls that wait or are being served, by transfer id."""
        self.tasks: set[asyncio.Task[None]] = set()
        self._answered = asyncio.Event()

    @classmethod
    def of(cls, worker: Any) -> _Sends:
        sends: _Sends | None = getattr(worker, "pdserve_sends", None)
        if sends is None:
            sends = worker.pdserve_sends = cls(worker)
        return sends

    def start(self, identity: bytes, sock: Any, work: Awaitable[None]) -> None:
        """Serve a pull in a task of its own: in the one that upstream awaits it in, no other pull would be served."""
        self.keep(asyncio.ensure_future(self._answering(identity, sock, work)))

    def keep(self, task: asyncio.Task[None]) -> None:
        """Keep a task until it ends, or the worker does."""
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _answering(self, identity: bytes, sock: Any, work: Awaitable[None]) -> None:
        """Answer a pull that fails: the error goes to decode, as _sender_worker would have sent it."""
        (ended,) = await asyncio.gather(work, return_exceptions=True)
        if isinstance(ended, BaseException) and not isinstance(ended, asyncio.CancelledError):
            log.error("a Mooncake pull failed: %s", ended, exc_info=ended)
            await self.respond(identity, sock, "ERROR", err_msg=str(ended) or type(ended).__name__)

    async def respond(self, identity: bytes, sock: Any, status: str, **fields: Any) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as upstream

        response = upstream.MooncakeXferResponse(status=upstream.MooncakeXferResponseStatus[status], **fields)
        await sock.send_multipart((identity, self.worker._encoder.encode(response)))

    # --- pulls

    async def serve(self, identity: bytes, sock: Any, pull: Any, original: Callable[..., Awaitable[None]]) -> None:
        import msgspec

        wanted: dict[str, Any] = dict(pull.req_blocks)
        while dead := [request for request, (transfer, _) in wanted.items() if self._is_dead(transfer)]:
            wanted = {request: blocks for request, blocks in wanted.items() if request not in dead}
            effects.count(_NAME, "pulls-answered-at-once", len(dead))
            await self.respond(identity, sock, "CONTINUE" if wanted else "FINISH", err_reqs=dead, err_msg=_GONE)
        if not wanted:
            return
        transfers = [transfer for transfer, _ in wanted.values()]
        self.asked.update(transfers)
        try:
            answering = _AnsweringSocket(self, sock, wanted)
            await original(self.worker, identity, answering, msgspec.structs.replace(pull, req_blocks=wanted))
        finally:
            self.asked.subtract(transfers)
            self._forget_never_prefilled(transfers)
            self.answered()  # also when no answer could be sent: withdrawals look again

    def _is_dead(self, transfer: str) -> bool:
        return transfer in self.aborted or transfer in self.unwanted

    def _forget_never_prefilled(self, transfers: list[str]) -> None:
        """Forget entries without a prefill. Upstream makes one for a pull that is ahead of its prefill, and keeps it
        for ever if none comes."""
        for transfer in transfers:
            entry = self.worker.reqs_need_send.get(transfer)
            if self.asked[transfer] > 0:
                continue
            del self.asked[transfer]
            if entry is not None and not entry.p_req_id and not entry.ready.is_set():
                del self.worker.reqs_need_send[transfer]

    def answered(self) -> None:
        """Hear that a round of sends has ended and was answered."""
        self._answered.set()
        self._answered = asyncio.Event()

    # --- withdrawals

    async def withdraw(self, identity: bytes, sock: Any, transfers: dict[str, str]) -> None:
        """Drop what has not begun, wait for what has, then answer."""
        left = set(transfers.values())
        for transfer in left:
            self.unwanted.add(transfer)
        while left := {transfer for transfer in left if not self._dropped(transfer)}:
            await self._answered.wait()
        await self.respond(identity, sock, "FINISH", ok_reqs=list(transfers))

    def _dropped(self, transfer: str) -> bool:
        entry = self.worker.reqs_need_send.get(transfer)
        if entry is None:
            return True
        if entry.sending:
            return False
        del self.worker.reqs_need_send[transfer]
        if entry.ready.is_set() and entry.p_req_id:
            self.worker.finished_sending_reqs.add(entry.p_req_id)
        # Pulls that wait find it gone and are answered; without a prefill yet, its KV is freed when it comes.
        entry.ready.set()
        effects.count(_NAME, "transfers-withdrawn")
        return True

    # --- metadata of prefill's scheduler

    async def record(self, metadata: Any, original: Callable[..., Awaitable[None]]) -> None:
        known = copy.copy(metadata)
        known.reqs_to_send = {
            request: (transfer, blocks)
            for request, (transfer, blocks) in metadata.reqs_to_send.items()
            if self._is_to_be_sent(request, transfer, blocks)
        }
        known.reqs_not_processed = set()
        never_ready = []
        coming = {transfer for transfer, _ in known.reqs_to_send.values()}
        delivered = {transfer for transfer, blocks in known.reqs_to_send.values() if blocks}
        for transfer in metadata.reqs_not_processed:
            entry = self.worker.reqs_need_send.get(transfer)
            if transfer in delivered or (entry is not None and entry.ready.is_set()):
                continue  # the KV of another request that was given the same id
            self.aborted.add(transfer)
            effects.count(_NAME, "transfers-aborted")
            if entry is not None:
                never_ready.append(entry)
            if entry is not None or transfer in coming:
                # Upstream pops any other with a KeyError, and the rest of the batch is lost.
                known.reqs_not_processed.add(transfer)
        await original(self.worker, known)
        for entry in never_ready:
            entry.ready.set()  # pulls that wait for it find it gone and are answered

    def _is_to_be_sent(self, request: str, transfer: str, blocks: Any) -> bool:
        from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as upstream

        entry = self.worker.reqs_need_send.get(transfer)
        other = entry is not None and entry.ready.is_set() and entry.p_req_id != request
        if transfer in self.unwanted or (blocks and other):
            if blocks:
                # No decode will fetch it, or the id is another request's: upstream would hold the blocks for ever.
                self.worker.finished_sending_reqs.add(request)
                effects.count(_NAME, "unwanted-freed")
            return False
        self.aborted.discard(transfer)
        if blocks and entry is None:
            self.worker.reqs_need_send[transfer] = upstream.SendBlockMeta(
                p_req_id=request, transfer_id=transfer, local_block_ids=[], ready=asyncio.Event()
            )
        return True


class _AnsweringSocket:
    """Sees to it that every request of a pull is answered: upstream forgets those whose transfer has disappeared, and
    before 0.33 decode then waits for its whole timeout."""

    def __init__(self, sends: _Sends, sock: Any, wanted: dict[str, Any]) -> None:
        self._sends = sends
        self._sock = sock
        self._open = {request: transfer for request, (transfer, _) in wanted.items()}

    async def send_multipart(self, frames: tuple[bytes, bytes]) -> None:
        import msgspec

        identity, payload = frames
        worker = self._sends.worker
        response = worker._xfer_resp_decoder.decode(payload)
        if response.status.name in ("CONTINUE", "FINISH"):
            for request in (*(response.ok_reqs or ()), *(response.err_reqs or ())):
                self._open.pop(request, None)
            last = response.status.name == "FINISH"
            gone = [
                request for request, transfer in self._open.items() if last or transfer not in worker.reqs_need_send
            ]
            if gone:
                self._open = {request: transfer for request, transfer in self._open.items() if request not in gone}
                effects.count(_NAME, "waiting-pulls-answered", len(gone))
                errors = [*(response.err_reqs or ()), *gone]
                response = msgspec.structs.replace(response, err_reqs=errors, err_msg=response.err_msg or _GONE)
                payload = worker._encoder.encode(response)
        await self._sock.send_multipart((identity, payload))
        self._sends.answered()


def _listening(original: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    async def _mooncake_sender_listener(self: Any, ready_event: Any) -> None:
        self._xfer_meta_decoder = SideChannelDecoder(self._xfer_meta_decoder)
        sends = _Sends.of(self)
        sockets.widen(self.async_zmq_ctx)
        sends.keep(asyncio.ensure_future(sockets.look_out(_NAME)))
        try:
            await original(self, ready_event)
        finally:
            for task in sends.tasks:
                task.cancel()
            await asyncio.gather(*sends.tasks, return_exceptions=True)

    return _mooncake_sender_listener


def _in_the_background(original: Callable[..., Awaitable[None]]) -> Callable[..., Coroutine[Any, Any, None]]:
    async def send_kv_to_decode(self: Any, identity: bytes, sock: Any, meta: Any) -> None:
        sends = _Sends.of(self)
        if isinstance(meta, Withdrawal):
            sends.start(identity, sock, sends.withdraw(identity, sock, dict(meta.transfers)))
        else:
            sends.start(identity, sock, sends.serve(identity, sock, meta, original))

    return send_kv_to_decode


def _recorded(original: Callable[..., Awaitable[None]]) -> Callable[..., Coroutine[Any, Any, None]]:
    async def record_send_reqs(self: Any, metadata: Any) -> None:
        await _Sends.of(self).record(metadata, original)

    return record_send_reqs


PATCH = Patch(
    name=_NAME,
    behaviour="abandoned transfers",
    summary=(
        "A pull for a prefill that was aborted is never answered and occupies one of prefill's 20 sender tasks for the "
        "abort timeout (480 s): about 20 departed clients stall a prefill. Waiting occupies nothing any more, such "
        "pulls are answered at once, and decode can withdraw a pull."
    ),
    issue="not reported upstream; the sibling defect on decode's side is vllm#35943",
    targets=(
        PatchTarget(f"{_WORKER}._mooncake_sender_listener", body=True),
        PatchTarget(f"{_WORKER}._sender_worker", body=True),
        PatchTarget(f"{_WORKER}.send_kv_to_decode", body=True),
        PatchTarget(f"{_WORKER}.record_send_reqs", body=True),
        PatchTarget(f"{_WORKER}.fetch_finished_sending_reqs", body=True),
    ),
    runs_in=("worker",),
    connectors=frozenset({"MooncakeConnector"}),
    required=True,
    serves_without=(
        "clients that leave during prefill hold up the transfers of others for timeouts.transfer_abort_seconds"
    ),
    effects={
        "transfers-aborted": "transfers whose prefill was aborted",
        "waiting-pulls-answered": "pulls that waited for KV that will not come and were answered",
        "pulls-answered-at-once": "pulls that came after their transfer was aborted or withdrawn",
        "transfers-withdrawn": "transfers dropped because decode withdrew its pull",
        "unwanted-freed": "prefills whose KV was freed at once because no decode will fetch it",
        sockets.OUT_OF_SOCKETS: sockets.HELP,
    },
    remove_when="upstream answers pulls of aborted prefills and waits outside its sender tasks",
    apply=apply,
)
