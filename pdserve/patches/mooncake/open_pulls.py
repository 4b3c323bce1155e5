"""What a decode worker knows of the pulls that prefill workers may still write for.

A request's blocks belong to its pull until every prefill worker that was asked has settled it: delivered, refused, or
died. Before, none of them may be released, whatever has become of the request (vllm 0.33 counts like this; 0.30 to
0.32 release at the first failure, earlier versions never). All of it happens in the worker's receiver loop.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pdserve.patches.mooncake import sockets
from pdserve.patches.mooncake.lines import Lines

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
        """Without blocks it only makes prefill free its own; no request waits for it."""
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
        """Its turn has come; for what is left of the batch. False: nothing is."""
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
        """Upstream has started to ask `pull_tasks_count` peers for each of these."""
        for request, meta in metas.items():
            if request in self._pulls:
                self._pulls[request].peers_left = meta.pull_tasks_count

    def unasked(self, metas: Iterable[str]) -> list[str]:
        pulls = {request: self._pulls.get(request) for request in metas}
        return [request for request, pull in pulls.items() if pull is not None and pull.peers_left is None]

    def is_wanted(self, request: str) -> bool:
        """Whether a request waits for its KV; else prefill only has to free its own."""
        pull = self._pulls.get(request)
        return pull is not None and pull.has_blocks and not pull.withdrawn

    def open_peer(self, address: str, metas: dict[str, Any]) -> Peer:
        """Without the pulls that were withdrawn before this peer was asked: these are settled."""
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
        """Marks pulls whose requests have ended; the peers to notify, with request -> transfer id."""
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
        """What a peer has not settled, request -> transfer id."""
        return {request: peer.batch[request].transfer_id for request in peer.unsettled if request in peer.batch}

    def settle(self, peer: Peer, request: str, *, failed: bool) -> None:
        """This peer will not write for this request again."""
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
        """Its KV will not come from this peer; None: no peer could be asked."""
        if peer is not None:
            self.settle(peer, request, failed=True)
            return
        pull = self._pulls.get(request)
        if pull is not None:
            pull.failed = True
            self._end(request, pull)

    @property
    def can_report(self) -> bool:
        """Whether the scheduler can fail the load of a request that still wants it.

        Before 0.30 it takes ids of blocks, and only for models with one group of KV layers.
        """
        return hasattr(self._worker, "_handle_failed_recv") or len(self._worker.kv_cache_config.kv_cache_groups) == 1

    def report(self, request: str) -> None:
        """Its blocks as failed, once, where upstream does not (before 0.30); must come before `fail`."""
        pull = self._pulls[request]
        if pull.has_blocks and not pull.failed and self.can_report:
            self._worker.xfer_stats.record_failed_recv()
            self._failed_blocks.put({block for group in pull.meta.local_block_ids for block in group})

    def take_failed_blocks(self) -> set[int]:
        """Since the last call. For the worker's own thread."""
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
        """No peer may write any more. The scheduler hears of a request once, and never of one that does not wait."""
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
