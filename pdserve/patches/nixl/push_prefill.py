"""Prefill's side of nixl-push: no WRITE begins for blocks that prefill no longer holds, and none outlives them.

Two threads of a worker are concerned. The engine's thread ends leases and learns which WRITEs have ended; the writer
thread begins them. A lock stands between "the lease has ended" and "a WRITE begins".
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from threading import Lock
from typing import Any

from pdserve.patches import effects
from pdserve.patches.nixl.push_messages import PushPeer, PushWord, base_of

NAME = "nixl-push"
REFUSED, KEPT, ANSWERED = "writes-refused", "leases-outlived", "withdrawals-answered"
_REMEMBERED = 65_536
"""Ids of requests that nothing is written for any more. Ids are new in every attempt, so an old one never returns."""
_LONG_AGO = 0.0
"""Of perf_counter, on every machine."""


class Writes:
    """Of one worker."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._lock = Lock()
        self._held: dict[str, str] = {}
        """Base id -> prefill's id of each request whose blocks are kept for decode."""
        self._posting: set[str] = set()
        """Ids whose WRITE the writer thread is just beginning."""
        self._closed: dict[str, None] = {}
        """Base ids for which no WRITE begins any more, the oldest first."""
        self._ending: set[str] = set()
        """Ids whose lease the engine's thread is to end."""
        self._outlived: set[str] = set()
        """Ids whose WRITE goes on after the end of their lease. Of the engine's thread."""
        self._posted: set[str] = set()
        """Ids whose WRITE has begun, until its end is known: one may have failed before anybody saw it under way."""
        self._asked: dict[str, tuple[str, PushPeer]] = {}
        """Prefill's id -> decode's id and decode, of WRITEs that have begun."""
        self._owed: dict[str, tuple[str, PushPeer]] = {}
        """Base id -> whom to answer, once nothing is written. Of the writer thread."""
        self._handshakes: dict[str, Future[Any]] = {}
        """Base id -> what such an answer waits for."""
        self._failed: deque[tuple[str, PushPeer]] = deque()
        """The same, from the engine's thread."""
        self._unreached: deque[Mapping[str, Any]] = deque()
        """Registrations of decodes with which the handshake has failed, from the thread that tried."""
        self._aborted: deque[str] = deque()
        """Base ids of prompts of which nothing is kept, from the engine's thread."""

    # --- the engine's thread

    def begin_step(self, finished: Iterable[str], aborted: Iterable[str]) -> set[str]:
        """Before the writer thread hears of them: prompts that are computed, and prompts of which nothing is kept.
        Returns those computed ones that decode has withdrawn meanwhile. The writer must not hear of them: their lease
        ends in this step, and what tells it so could come first; it would look for a registration for ever."""
        unwanted = set()
        with self._lock:
            for name in finished:
                self._held[base_of(name)] = name
                if base_of(name) in self._closed:
                    self._ending.add(name)
                    unwanted.add(name)
            for name in aborted:
                self._close(base_of(name))
                self._aborted.append(base_of(name))
        return unwanted

    def heartbeat(self, payload: str) -> str:
        """The same, with prefill's own ids: decode only knows the part of an id that both have."""
        return ",".join(self._held.get(base_of(name), name) for name in payload.split(","))

    def end_leases(self, original: Callable[[set[str]], None], done_sending: set[str]) -> None:
        """As upstream, without those that a WRITE still reads from, and with those that decode has withdrawn."""
        leases = self._worker._reqs_to_send
        with self._lock:
            for name in self._ending & leases.keys():
                leases[name] = _LONG_AGO
            self._ending = {name for name in self._ending - leases.keys() if base_of(name) in self._held}
            busy = {name: end for name, end in leases.items() if self._writes(name)}
            for name in busy:
                del leases[name]
            before = set(leases)
            try:
                original(done_sending)
            finally:
                for name in before - leases.keys():
                    self._let_go(name)
                leases.update(busy)
        now = time.perf_counter()
        overdue = {name for name, end in busy.items() if end <= now}
        effects.count(NAME, KEPT, len(overdue - self._outlived))
        self._outlived = overdue

    def end_writes(self, original: Callable[[], Any]) -> Any:
        """As upstream; a WRITE that has failed ends its lease, and decode is told."""
        results = original()
        with self._lock:
            for name in results.finished_sending:
                self._let_go(name)
            for name in self._posted - self._under_way():
                self._posted.discard(name)
                self._close(base_of(name))
                self._ending.add(name)
                if (asked := self._asked.pop(name, None)) is not None:
                    self._failed.append(asked)
        return results

    # --- the writer's thread

    def begin(self, original: Callable[..., None], name: str, blocks: Any, registration: Mapping[str, Any]) -> None:
        """Begins the WRITE, or the handshake before it, unless the blocks are not held any more."""
        base, decode = base_of(name), PushPeer.decode_of(registration)
        handshake = self._worker._ensure_handshake(decode.engine, decode.host, decode.port, decode.tp)
        if handshake is not None:
            # As upstream, but that decode is told when it fails.
            handshake.add_done_callback(partial(self._shaken, (name, blocks, registration)))
            return
        with self._lock:
            expires = self._worker._reqs_to_send.get(name)
            ended = expires is not None and time.perf_counter() >= expires
            may = self._held.get(base) == name and base not in self._closed and not ended
            if may:
                self._posting.add(name)
                self._asked[name] = (registration["request_id"], decode)
        if not may:
            effects.count(NAME, REFUSED)
            self._close_now(base)
            self._owe(registration)
            return
        failed = True
        try:
            original(name, blocks, registration)
            with self._worker._sending_transfers_lock:
                failed = name in self._worker._send_failures and name not in self._worker._sending_transfers
        finally:
            with self._lock:
                self._posting.discard(name)
                if not failed and self._held.get(base) == name:
                    self._posted.add(name)
            if failed:
                # By an exception: before anything was posted. One of the library's own is caught where it happens.
                self._close_now(base)
                self._owe(registration)

    def registered(self, original: Callable[[], None], registration: Any) -> None:
        """A decode waits for a WRITE: as upstream, unless there will be none."""
        name = registration.get("request_id") if isinstance(registration, dict) else None
        with self._lock:
            closed = isinstance(name, str) and base_of(name) in self._closed
        if closed:
            self._owe(registration)
        else:
            original()

    def withdrawn(self, message: PushWord) -> None:
        """Decode wants nothing written any more."""
        base, worker = base_of(message.request_id), self._worker
        with self._lock:
            self._close(base)
            name = self._held.get(base)
            if name is not None:
                self._ending.add(name)
        worker._pending_d_registrations.pop(message.request_id, None)
        if name is not None:
            worker._push_finished_blocks.pop(name, None)
        self._owed[base] = (message.request_id, message.sender)

    def answer(self, send: Callable[[PushPeer, str], Future[Any] | None]) -> None:
        """Answers each decode that is owed it, as soon as the answer is true. `send` sends it, or returns what it waits
        for."""
        while self._failed:
            request_id, peer = self._failed.popleft()
            self._owed[base_of(request_id)] = (request_id, peer)
        while self._unreached:
            registration = self._unreached.popleft()
            self._close_now(base_of(registration["request_id"]))
            self._owe(registration)
        while self._aborted:
            self._forget_registrations(self._aborted.popleft())
        for base, (request_id, peer) in list(self._owed.items()):
            with self._lock:
                name = self._held.get(base)
                waits = name is not None and self._writes(name)
            if waits or ((handshake := self._handshakes.get(base)) is not None and not handshake.done()):
                continue
            del self._owed[base]
            if handshake is not None:
                del self._handshakes[base]
                if handshake.exception() is not None:
                    # Decode is gone, or asks again.
                    continue
            pending = send(peer, request_id)
            if pending is None:
                effects.count(NAME, ANSWERED)
            else:
                self._owed[base] = (request_id, peer)
                self._handshakes[base] = pending

    # ---

    def _shaken(self, write: tuple[str, Any, Mapping[str, Any]], handshake: Future[Any]) -> None:
        """It has ended, in the thread that tried."""
        if handshake.cancelled() or handshake.exception() is not None:
            self._unreached.append(write[2])
        else:
            self._worker._deferred_push_inbox.put(write)
        self._worker._push_writer_wake.set()

    def _forget_registrations(self, base: str) -> None:
        pending = self._worker._pending_d_registrations
        for name in [name for name in pending if base_of(name) == base]:
            self._owe(pending.pop(name))

    def _owe(self, registration: Mapping[str, Any]) -> None:
        try:
            name, peer = str(registration["request_id"]), PushPeer.decode_of(registration)
        except (KeyError, TypeError, ValueError):
            return
        self._owed[base_of(name)] = (name, peer)

    def _under_way(self) -> set[str]:
        with self._worker._sending_transfers_lock:
            return set(self._worker._sending_transfers)

    def _writes(self, name: str) -> bool:
        """Whether a WRITE from the blocks of a request may be under way."""
        if name in self._posting:
            return True
        with self._worker._sending_transfers_lock:
            return name in self._worker._sending_transfers

    def _let_go(self, name: str) -> None:
        base = base_of(name)
        if self._held.get(base) == name:
            del self._held[base]
        self._posted.discard(name)
        self._asked.pop(name, None)
        self._close(base)

    def _close_now(self, base: str) -> None:
        with self._lock:
            self._close(base)
            if (name := self._held.get(base)) is not None:
                self._ending.add(name)

    def _close(self, base: str) -> None:
        self._closed[base] = None
        while len(self._closed) > _REMEMBERED:
            del self._closed[next(iter(self._closed))]
