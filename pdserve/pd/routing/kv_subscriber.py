"""Follows the KV events of engines over ZMQ and keeps an index up to date."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from enum import Enum

import zmq
import zmq.asyncio

from pdserve.pd.routing.kv_index import KvIndex
from pdserve.pd.routing.kv_sources import Source
from pdserve.pd.routing.kv_wire import BadEventsError, decode


class Step(Enum):
    """An order about a batch."""

    APPLY = "apply"
    SKIP = "skip"
    """A replay has brought it already."""
    GAP = "gap"
    """Batches before it are missing."""
    RESTART = "restart"
    """The numbers have begun anew: another life of the engine. Forget, then ask again."""


class Feed:
    """Numbers of one publisher. A second life whose numbers have already overtaken those of the first looks like a gap:
    whoever knows of restarts begins a new Feed for each life."""

    __slots__ = ("_live", "expected")

    def __init__(self) -> None:
        self.expected = 0
        """The number that comes next; a replay is asked for from here on."""
        self._live = -1

    def live(self, number: int) -> Step:
        """A batch as it was published."""
        if number <= self._live:
            self.expected = 0
            self._live = -1
            return Step.RESTART
        if number > self.expected:
            return Step.GAP
        self._live = number
        if number < self.expected:
            return Step.SKIP
        self.expected += 1
        return Step.APPLY

    def replayed(self, number: int) -> Step:
        """A batch of a replay: APPLY, SKIP, or GAP when the publisher does not have those before it any more."""
        if number > self.expected:
            return Step.GAP
        if number < self.expected:
            return Step.SKIP
        self.expected += 1
        return Step.APPLY

    def jump(self, number: int, *, live: bool) -> None:
        """Go on with this batch as if nothing had been before it. What was known must have been forgotten."""
        self.expected = number + 1
        if live:
            self._live = number


log = logging.getLogger("pdserve.proxy")

_QUEUED_BATCHES = 10_000
_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_NUMBER_BYTES = 8


class KvSubscriber:
    """One task for each publisher, from `start` to `stop`: one life of a worker. Breaks of the connection are ZMQ's to
    mend; what was missed in them is asked for again, or else all that was known of that rank is forgotten."""

    def __init__(self, index: KvIndex, replay_timeout_seconds: float) -> None:
        self._index = index
        self._timeout_ms = int(replay_timeout_seconds * 1000)
        self._context = zmq.asyncio.Context()
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}
        self.counts: Counter[str] = Counter()
        """Batches: applied, bad; events of unknown type; gaps, replays, restarts."""

    def start(self, worker: str, sources: Sequence[Source]) -> None:
        """A worker came up. Anything known of an earlier life is forgotten."""
        self._end(worker)
        self._tasks[worker] = tasks = []
        for source in sources:
            task = asyncio.create_task(self._follow(worker, source), name=f"kv events of {worker}")
            task.add_done_callback(_report_failure)
            tasks.append(task)

    async def stop(self, worker: str) -> None:
        """A worker is gone."""
        await asyncio.gather(*self._end(worker), return_exceptions=True)

    async def close(self) -> None:
        """Stop all."""
        for worker in list(self._tasks):
            await self.stop(worker)
        self._context.destroy(linger=0)

    def _end(self, worker: str) -> list[asyncio.Task[None]]:
        tasks = self._tasks.pop(worker, [])
        for task in tasks:
            task.cancel()
        self._index.forget(worker)
        return tasks

    async def _follow(self, worker: str, source: Source) -> None:
        with self._context.socket(zmq.SUB) as socket:
            _guard(socket)
            socket.subscribe(source.topic)
            try:
                socket.connect(source.endpoint)
            except zmq.ZMQError as error:
                log.error("kv events of %s: cannot follow %s: %s", worker, source.endpoint, error)
                return
            following = _EndpointFollower(self._index, self.counts, worker, source)
            await self._catch_up(following)
            while True:
                frames = await socket.recv_multipart()
                if len(frames) < 2 or len(frames[-2]) != _NUMBER_BYTES:
                    self.counts["bad"] += 1
                else:
                    await self._take(following, int.from_bytes(frames[-2]), frames[-1])
                # A receive that finds a message does not wait: in a flood nothing else would ever run.
                await asyncio.sleep(0)

    async def _take(self, following: _EndpointFollower, number: int, payload: bytes) -> None:
        step = following.feed.live(number)
        if step is Step.RESTART:
            self.counts["restarts"] += 1
            following.forget()
            step = following.feed.live(number)
        if step is Step.GAP:
            self.counts["gaps"] += 1
            await self._catch_up(following)
            step = following.feed.live(number)
        if step is Step.GAP:
            following.begin_at(number, payload, live=True)
        elif step is Step.APPLY:
            following.apply(payload)

    async def _catch_up(self, following: _EndpointFollower) -> None:
        """Ask for what is missing up to now, if this engine can repeat it."""
        if following.source.replay_endpoint is None:
            return
        self.counts["replays"] += 1
        async with aclosing(self._replay(following)) as batches:
            async for number, payload in batches:
                step = following.feed.replayed(number)
                if step is Step.GAP:
                    following.begin_at(number, payload, live=False)
                elif step is Step.APPLY:
                    following.apply(payload)
                await asyncio.sleep(0)

    async def _replay(self, following: _EndpointFollower) -> AsyncGenerator[tuple[int, bytes], None]:
        source = following.source
        with self._context.socket(zmq.DEALER) as socket:
            _guard(socket)
            try:
                socket.connect(source.replay_endpoint or "")
            except zmq.ZMQError as error:
                log.error("kv events of %s: cannot ask %s: %s", following.worker, source.replay_endpoint, error)
                return
            await socket.send_multipart([b"", following.feed.expected.to_bytes(_NUMBER_BYTES)])
            while await socket.poll(self._timeout_ms):
                # Before vLLM 0.27 ["", number, payload], since then ["", topic, number, payload].
                frames = await socket.recv_multipart()
                number = int.from_bytes(frames[-2], signed=True) if len(frames) > 2 else -1
                if number < 0:
                    return
                yield number, frames[-1]
            log.warning("kv events of %s: %s does not answer", following.worker, source.replay_endpoint)


class _EndpointFollower:
    """Follows one publisher."""

    def __init__(self, index: KvIndex, counts: Counter[str], worker: str, source: Source) -> None:
        self._index = index
        self._counts = counts
        self._rank = source.rank
        self.worker = worker
        self.source = source
        self.feed = Feed()

    def apply(self, payload: bytes) -> None:
        try:
            batch = decode(payload)
        except BadEventsError as error:
            self._counts["bad"] += 1
            log.warning("kv events of %s, rank %d: cannot read a batch: %s", self.worker, self._rank, error)
            self.forget()
            return
        if batch.rank is not None:
            self._rank = batch.rank
        self._counts["applied"] += 1
        self._counts["unknown"] += batch.unknown
        self._index.apply(self.worker, self._rank, batch.events)

    def begin_at(self, number: int, payload: bytes, *, live: bool) -> None:
        """Begin without what came before: some of what is known may be gone by now, and it is unknown what."""
        self.forget()
        self.feed.jump(number, live=live)
        self.apply(payload)

    def forget(self) -> None:
        self._index.forget(self.worker, self._rank)


def _report_failure(task: asyncio.Task[None]) -> None:
    """A follower ends only when it is cancelled. If it fails, its index would grow old without a word."""
    error = None if task.cancelled() else task.exception()
    if error is not None:
        log.error("%s: stopped", task.get_name(), exc_info=error)


def _guard(socket: zmq.asyncio.Socket) -> None:
    """Bounded memory, and a peer that vanished without a word is noticed."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, _QUEUED_BATCHES)
    socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 5_000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15_000)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 5_000)
