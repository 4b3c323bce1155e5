"""Patches lmcache-identity and lmcache-registration: workers register again at every server that does not know them.

Upstream (lmcache 0.5.6) registers again after an unhealthy heartbeat only, and the heartbeat begins with the first
store. A server that died before it, or that is back before a ping has timed out, answers the next ping: it refuses
all that the worker stores, in silence. Here three signs mean that the server may be a new one: its identity
(lmcache-identity gives each start of a server a name), a connection that broke, and a heartbeat that was late by more
than the server waits for one.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterable
from typing import Any

from pdserve.patches import effects
from pdserve.patches.lmcache.clients import ADAPTERS, HOOK, once_loaded
from pdserve.patches.patch import Patch, PatchTarget, wrap

IDENTITY_NAME = "lmcache-identity"
_PREFIX = "pdserve-server-"
_MANAGEMENT = "lmcache.v1.multiprocess.modules.management"


def _apply_identity() -> None:
    """Wraps ManagementModule.get_experimental: its list of capabilities is the one answer that any client may ask for
    and that may grow; a client looks for those that it knows in it."""
    from lmcache.v1.multiprocess.modules.management import ManagementModule

    this_life = f"{_PREFIX}{uuid.uuid4().hex}"

    def around(original: Callable[..., list[str]]) -> Callable[..., list[str]]:
        def get_experimental(self: Any) -> list[str]:
            return [*original(self), this_life]

        return get_experimental

    wrap(ManagementModule, "get_experimental", patch=IDENTITY_NAME, around=around)


def identity_in(capabilities: Iterable[str]) -> str | None:
    """Return the name of the server's start; None: the server has no such name."""
    return next((name for name in capabilities if name.startswith(_PREFIX)), None)


IDENTITY = Patch(
    name=IDENTITY_NAME,
    behaviour="LMCache server",
    summary=(
        "A new LMCache server answers the pings of its predecessor's clients as if nothing had happened, and drops "
        "all that they store. With the patch its capabilities have a name that is new at each start. "
        "lmcache-registration reads it."
    ),
    issue='not reported yet: docs/upstream-issues.md, "a worker is never registered"',
    targets=(PatchTarget(f"{_MANAGEMENT}.ManagementModule.get_experimental", body=True),),
    runs_in=("lmcache-server",),
    required=False,
    remove_when="a server answers the ping of an unregistered worker with an error",
    apply=_apply_identity,
)


NAME = "lmcache-registration"
_logger = logging.getLogger("vllm.pdserve")
_KNOWN_BY = "pdserve_known_by"
"""Of a worker's adapter: the server that it registered at, and over which connection (_Server)."""
_BROKEN = "pdserve_broken"
"""Of a message queue's client: how many of its connections have ended."""
_HEARTBEATS = "pdserve_heartbeats"
"""Of a message queue's client: those that ping over it."""
_PINGED = "pdserve_pinged"
"""Of a heartbeat: when its last ping was answered, in seconds of time.monotonic."""
_LATE = 2.5
"""Heartbeats. A server forgets a worker after three at the earliest (lmcache's _SERVER_REAP_TIMEOUT_FLOOR_SECONDS)."""

_ANSWERS: dict[str, Any] = {"ping": False, "lookup": None, "query_prefetch_status": 0}
"""What a request that no server will answer comes to: unhealthy; and nothing is in the cache. A lookup without an
answer would keep its request waiting for mq_timeout."""
_TRANSFERS = frozenset({"store", "retrieve", "store_q", "prepare_store", "commit_store", "prepare_retrieve"})
"""They touch an engine's blocks: they end only when it is certain that their server is gone, or by their own timeout.
(commit_retrieve is waited for in the same call.)"""

_Server = tuple[str | None, int]
"""Its identity, None where it has none; and how many connections had ended before."""


def apply_registration() -> None:
    """Wraps the heartbeat, the registration and the client's disconnect; matters in workers and in EngineCore."""
    once_loaded(NAME, _take_hold)


def _take_hold() -> None:
    from lmcache.integration.vllm import lmcache_mp_connector
    from lmcache.integration.vllm import vllm_multi_process_adapter as adapters
    from lmcache.v1.multiprocess.transport.zmq_impl import mq

    wrap(mq.MessageQueueClient, "cancel_streams", patch=NAME, around=_ending_unanswered_calls)
    wrap(adapters.HeartbeatThread, "_execute", patch=NAME, around=_asking_who_answers)
    worker = adapters.LMCacheMPWorkerAdapter
    wrap(worker, "_send_register_kv_caches_request", patch=NAME, around=_remembering_where)
    wrap(worker, "_reregister_kv_caches_callback", patch=NAME, around=_ending_lost_transfers)
    wrap(lmcache_mp_connector.LMCacheMPConnector, "get_handshake_metadata", patch=NAME, around=_then_heartbeat)


def _ending_unanswered_calls(original: Callable[..., None]) -> Callable[..., None]:
    """End the calls that wait on a connection that has ended. This runs in the thread of the message queue, which alone
    touches pending_futures."""

    def cancel_streams(self: Any) -> None:
        original(self)
        setattr(self, _BROKEN, getattr(self, _BROKEN, 0) + 1)
        # Those first: the receiver of an answer below must see that there is no server.
        for heartbeat in getattr(self, _HEARTBEATS, ()):
            heartbeat._health_event.clear()
            heartbeat.wake()
        for uid, (future, rpc) in list(self.pending_futures.items()):
            if rpc.operation in _TRANSFERS:
                continue
            del self.pending_futures[uid]
            if rpc.operation in _ANSWERS:
                future.set_result(_ANSWERS[rpc.operation])
            else:
                future.set_exception(
                    ConnectionError(f"the LMCache server went away before it answered {rpc.operation}")
                )

    return cancel_streams


def _asking_who_answers(original: Callable[..., Any]) -> Callable[..., Any]:
    def execute(self: Any) -> Any:
        queue = _queue(self._req_client)
        if self not in (known := getattr(queue, _HEARTBEATS, ())):
            setattr(queue, _HEARTBEATS, (*known, self))
        late = time.monotonic() - getattr(self, _PINGED, time.monotonic()) > _LATE * self._interval
        summary = original(self)
        if self.stop_requested or not self._health_event.is_set():
            return summary
        setattr(self, _PINGED, time.monotonic())
        # The scheduler's heartbeats have no adapter behind them, and nothing is registered there.
        adapter = getattr(self._recover_callback, "__self__", None)
        if adapter is not None and (late or _is_another(adapter, self._interval)):
            self._health_event.clear()
            if self._recover_callback():
                self._health_event.set()
        return summary

    return execute


def _is_another(adapter: Any, seconds: float) -> bool:
    """Tell whether the server that answers now is not, or may not be, the one that has this worker's registration."""
    try:
        return _server(adapter, seconds) != getattr(adapter, _KNOWN_BY, None)
    except (TimeoutError, ConnectionError):
        return False  # the next heartbeat asks again


def _server(adapter: Any, seconds: float) -> _Server:
    """Return the server that answers now. Raises TimeoutError or ConnectionError."""
    broken = getattr(_queue(adapter.req_client), _BROKEN, 0)
    return identity_in(adapter.req_client.get_experimental().result(timeout=seconds)), broken


def _queue(client: Any) -> Any:
    """Return what sends a client's requests; the client itself where it is not ZMQ's."""
    return getattr(client, "_message_queue_client", client)


def _remembering_where(original: Callable[..., None]) -> Callable[..., None]:
    def send_register_kv_caches_request(self: Any, *args: Any, **kwargs: Any) -> None:
        # Asked before: if the server changes in between, the next heartbeat sees that it is another one.
        try:
            server = _server(self, self._mq_timeout)
        except TimeoutError:
            raise ConnectionError(f"the LMCache server did not answer within {self._mq_timeout} s") from None
        original(self, *args, **kwargs)
        setattr(self, _KNOWN_BY, server)

    return send_register_kv_caches_request


def _ending_lost_transfers(original: Callable[..., bool]) -> Callable[..., bool]:
    """End what is pending when the adapter registers again. While it is unhealthy nothing new is sent, so that was sent
    to the server before."""

    def reregister_kv_caches_callback(self: Any) -> bool:
        before = getattr(self, _KNOWN_BY, None)
        registered = original(self)
        if not registered or not self.kv_caches:
            return registered
        if getattr(self, _KNOWN_BY, None) != before:
            effects.count(NAME, "registrations")
            effects.count(NAME, "transfers-ended", _end_transfers(self))
        return True

    return reregister_kv_caches_callback


def _end_transfers(adapter: Any) -> int:
    """End the transfers that wait for an answer of a server that is gone, as failed, and return their number.

    Others (engine_driven) copy by themselves and may still write to blocks: they end by their own timeout.
    """
    pending = [
        *list(adapter.store_futures.values()),
        *(future for future, _ in list(adapter.retrieve_futures.values())),
    ]
    raw = [future.raw_future_ for future in pending if hasattr(future, "raw_future_")]
    lost = [future for future in raw if not future.query()]
    for future in lost:
        future.set_result((b"", False))  # no work of a device, and no success
    if lost:
        _logger.warning("%d transfers of an LMCache server that is gone have ended as failed", len(lost))
    return len(lost)


def _then_heartbeat(original: Callable[..., Any]) -> Callable[..., Any]:
    """Start the heartbeat with the handshake: EngineCore asks each worker for that once, after warm-up and the capture
    of graphs, during which registering again could do harm. Without a heartbeat an idle worker would not see that its
    server is another one."""

    def get_handshake_metadata(self: Any) -> Any:
        adapter = getattr(self, "worker_adapter", None)
        if adapter is not None:
            adapter._ensure_heartbeat_started()
        return original(self)

    return get_handshake_metadata


_QUEUE = "lmcache.v1.multiprocess.transport.zmq_impl.mq.MessageQueueClient"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1"

REGISTRATION = Patch(
    name=NAME,
    behaviour="LMCache server",
    summary=(
        "LMCache's workers register again only after an unhealthy heartbeat, which begins with their first store. A "
        "server that is back before never hears of them and drops what they store, in silence. They register again "
        "when it is a new one (lmcache-identity) or their connection broke, and what only its predecessor could "
        "answer ends."
    ),
    issue='not reported yet: docs/upstream-issues.md, "a worker is never registered"',
    targets=(
        HOOK,
        PatchTarget(f"{_QUEUE}.cancel_streams", body=True),
        PatchTarget(f"{_QUEUE}.process_inbound", body=True),
        *(
            PatchTarget(f"{ADAPTERS}.{name}", body=True)
            for name in (
                "HeartbeatThread._execute",
                "LMCacheMPWorkerAdapter._send_register_kv_caches_request",
                "LMCacheMPWorkerAdapter._reregister_kv_caches_callback",
                "LMCacheMPWorkerAdapter._ensure_heartbeat_started",
                "LMCacheMPWorkerAdapter.get_finished",
            )
        ),
        PatchTarget("lmcache.v1.multiprocess.futures.DeviceMessagingFuture._on_raw_future_complete", body=True),
        PatchTarget(f"{_CONNECTOR}.get_handshake_metadata"),
    ),
    runs_in=("worker", "engine-core"),
    connectors=frozenset({"LMCacheMPConnector"}),
    required=False,
    effects={
        "registrations": "times that a worker registered again because its server was another one",
        "transfers-ended": "stores and loads of a server that was gone, ended as failed",
    },
    remove_when="LMCache's worker registers again when a server does not know it, whatever its heartbeat has seen",
    apply=apply_registration,
)
