"""Decode's side of nixl-push: a registration can be withdrawn, and its blocks are given back when nothing can write to
them any more.

That is known by one of: it was never sent; every prefill worker that has it says so; prefill's engine is gone. That an
engine is gone is seen at its side channel, which its EngineCore holds: it is refused, or another engine answers. Its
workers end with it, so it must have been seen for a while. No answer at all proves nothing: the blocks stay.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from pdserve.patches import effects
from pdserve.patches.nixl.push_messages import PushPeer, PushWord
from pdserve.patches.nixl.push_prefill import NAME

UNSENT, CLEARED, GONE = "registrations-unsent", "registrations-cleared", "registrations-orphaned"
ASK_SECONDS = 2.0
"""Until prefill is asked again."""
GONE_SECONDS = 30.0
"""How long a prefill engine must have been gone: its workers may outlive its EngineCore by moments."""
RELEASE_SECONDS = 60.0
"""How long it is tried to tell a prefill of a request that decode has never registered. Then its lease does."""
_PROBE_SECONDS = 5.0
_REMEMBERED = 65_536

Presence = Literal["here", "gone", "unknown"]
Ask = Callable[[PushPeer, PushPeer, str], object]
"""Sends prefill the withdrawal of a request, in the name of decode, and returns None; else what that waits for."""


@dataclass
class Registration:
    """One that was sent."""

    prefill: PushPeer
    decode: PushPeer
    """This engine, as its scheduler says that it is reached."""
    workers: int
    """How many of prefill's workers have it."""
    cleared: set[tuple[str, int]] = field(default_factory=set)
    withdrawn: bool = False
    ask_at: float = 0.0
    probe: Future[Presence] | None = None
    gone_since: float | None = None


class Withdrawals:
    """Of one worker. Everything but `order` and `received` happens in its writer thread."""

    def __init__(
        self,
        worker: Any,
        *,
        clock: Callable[[], float] = time.monotonic,
        presence: Callable[[PushPeer], Presence] | None = None,
    ) -> None:
        self._worker = worker
        self._clock = clock
        self._presence = presence or presence_of
        self._sent: dict[str, Registration] = {}
        self._never: dict[str, None] = {}
        """Requests that were withdrawn before their registration was sent, the oldest first."""
        self._orders: deque[str] = deque()
        self._releases: deque[tuple[str, PushPeer, PushPeer]] = deque()
        self._releasing: dict[str, tuple[PushPeer, PushPeer, float]] = {}
        self._probes: ThreadPoolExecutor | None = None

    # --- the engine's thread

    def order(self, withdrawn: Iterable[str], released: Iterable[tuple[str, PushPeer, PushPeer]]) -> None:
        """What the scheduler has decided: requests that wait for KV no longer, and some that never did, with prefill
        and with this engine."""
        self._orders.extend(withdrawn)
        self._releases.extend(released)

    def received(self, names: Iterable[str]) -> None:
        """Their transfers have ended."""
        for name in names:
            self._sent.pop(name, None)

    # --- the writer's thread

    def may_send(self, name: str) -> bool:
        """Whether its registration is still wanted."""
        return name not in self._never

    def sends(self, name: str, registration: Mapping[str, Any]) -> None:
        """It is sent now."""
        prefill = PushPeer.prefill_of(registration)
        with self._worker._handshake_lock:
            workers = len(self._worker._remote_agents.get(prefill.engine) or ())
        self._sent[name] = Registration(prefill, PushPeer.decode_of(registration), max(workers, 1))

    def cleared(self, message: PushWord) -> None:
        """A worker of prefill writes nothing for a request."""
        registration = self._sent.get(message.request_id)
        if registration is None or registration.prefill.engine != message.sender.engine:
            return
        registration.cleared.add((message.sender.engine, message.rank))
        if len(registration.cleared) >= registration.workers:
            self._end(message.request_id, CLEARED)

    def tick(self, ask: Ask) -> None:
        """Carries out orders, and asks again where it is time."""
        while self._orders:
            self._withdraw(self._orders.popleft())
        now = self._clock()
        while self._releases:
            name, prefill, decode = self._releases.popleft()
            self._releasing[name] = (prefill, decode, now + RELEASE_SECONDS)
        for name, (prefill, decode, until) in list(self._releasing.items()):
            if ask(prefill, decode, name) is None or now >= until:
                del self._releasing[name]
        for name, registration in list(self._sent.items()):
            if registration.withdrawn:
                self._pursue(name, registration, now, ask)

    def close(self) -> None:
        """Ends its thread."""
        if self._probes is not None:
            self._probes.shutdown(wait=False, cancel_futures=True)

    def _withdraw(self, name: str) -> None:
        registration = self._sent.get(name)
        if registration is not None:
            registration.withdrawn = True
        elif name in self._worker._recving_metadata:
            # In the queue still, or its handshake is under way: nobody knows of these blocks.
            self._never[name] = None
            while len(self._never) > _REMEMBERED:
                del self._never[next(iter(self._never))]
            self._end(name, UNSENT)

    def _pursue(self, name: str, registration: Registration, now: float, ask: Ask) -> None:
        self._look(registration, now)
        if registration.gone_since is not None and now - registration.gone_since >= GONE_SECONDS:
            self._end(name, GONE)
        elif now >= registration.ask_at:
            registration.ask_at = now + ASK_SECONDS
            if registration.gone_since is None:
                ask(registration.prefill, registration.decode, name)
            if registration.probe is None:
                self._probes = self._probes or ThreadPoolExecutor(1, thread_name_prefix="pdserve-push-probe")
                registration.probe = self._probes.submit(self._presence, registration.prefill)

    @staticmethod
    def _look(registration: Registration, now: float) -> None:
        probe = registration.probe
        if probe is None or not probe.done():
            return
        registration.probe = None
        seen = "unknown" if probe.exception() is not None else probe.result()
        if seen != "gone":
            registration.gone_since = None
        elif registration.gone_since is None:
            registration.gone_since = now

    def _end(self, name: str, how: str) -> None:
        """Reports it as a load that has failed: the scheduler has it computed, or frees its blocks if it was
        aborted."""
        self._sent.pop(name, None)
        effects.count(NAME, how)
        self._worker._failed_recv_reqs.put(name)


def presence_of(prefill: PushPeer) -> Presence:
    """Whether that engine still answers at its side channel. Takes seconds."""
    try:
        socket.create_connection((prefill.host, prefill.port), timeout=_PROBE_SECONDS).close()
    except ConnectionRefusedError:
        return "gone"
    except OSError:
        return "unknown"
    # Whatever zmq or msgspec make of what listens there.
    with suppress(Exception):
        return "here" if _engine_at(prefill) == prefill.engine else "gone"
    return "unknown"


def _engine_at(prefill: PushPeer) -> str:
    """The engine id that the side channel names, asked as vLLM's own handshake asks."""
    import msgspec
    import zmq
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils import zmq_ctx
    from vllm.utils.network_utils import make_zmq_path

    with zmq_ctx(zmq.REQ, make_zmq_path("tcp", prefill.host, prefill.port)) as sock:
        sock.setsockopt(zmq.RCVTIMEO, int(_PROBE_SECONDS * 1000))
        sock.send(msgspec.msgpack.encode((GET_META_MSG, 0, 0)))
        payload = msgspec.msgpack.decode(sock.recv_multipart()[0])
    return str(msgspec.msgpack.decode(payload["agent_metadata_bytes"])["engine_id"])
