"""The worker of nixl-push: what each of its threads does beside upstream's."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from pdserve.patches.nixl import push_decode, push_prefill
from pdserve.patches.nixl.push_messages import PushPeer, PushWord, decode
from pdserve.patches.nixl.push_scheduler import ORDERS, RELEASES

log = logging.getLogger("pdserve.patches")

ATTRIBUTE = "pdserve_push"
"""Where a worker of NixlPushConnector has its PushHalf."""
POLL_SECONDS = 0.1
"""Until an idle writer thread looks for notifications."""


class PushHalf:
    """What one worker has beside upstream's."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self.writes = push_prefill.Writes(worker)
        self.withdrawals = push_decode.Withdrawals(worker)
        self._heard: deque[PushWord] = deque()

    def work(self) -> None:
        """In the writer thread, about every POLL_SECONDS: what was heard, and what is due."""
        while self._heard:
            message = self._heard.popleft()
            if message.what == "withdraw":
                self.writes.withdrawn(message)
            else:
                self.withdrawals.cleared(message)
        self.withdrawals.tick(self._ask)
        self.writes.answer(self._answer)

    def hear(self, notifications: dict[str, list[bytes]]) -> dict[str, list[bytes]]:
        """Takes ours out, for `work` to do at once."""
        others: dict[str, list[bytes]] = {}
        for agent, each in notifications.items():
            for notification in each:
                if (message := decode(notification)) is None:
                    others.setdefault(agent, []).append(notification)
                else:
                    self._heard.append(message)
        if self._heard:
            self._worker._push_writer_wake.set()
        return others

    def _ask(self, prefill: PushPeer, decode_engine: PushPeer, request_id: str) -> Any:
        message = PushWord("withdraw", request_id, decode_engine, self._worker.tp_rank)
        return self._send(message, prefill, notif_agents_only=True)

    def _answer(self, decode_engine: PushPeer, request_id: str) -> Any:
        # Decode knows where prefill is: the engine id says which life of it answers.
        message = PushWord("clear", request_id, PushPeer(self._worker.engine_id, "", 0, 1), self._worker.tp_rank)
        return self._send(message, decode_engine, notif_agents_only=False)

    def _send(self, message: PushWord, peer: PushPeer, *, notif_agents_only: bool) -> Any:
        """None: it is sent, as far as this engine can tell. Else what it waits for."""
        worker = self._worker
        pending = worker._ensure_handshake(
            peer.engine, peer.host, peer.port, peer.tp, pp_size=peer.pp, notif_agents_only=notif_agents_only
        )
        if pending is not None:
            return pending
        with worker._handshake_lock:
            agents = list((worker._remote_agents.get(peer.engine) or {}).values())
        notification = message.encode()
        for agent in agents:
            sent = False
            # Whatever the library raises, the peer may be gone. Decode asks again and looks at the side channel;
            # prefill is asked again.
            with suppress(Exception):
                worker.nixl_wrapper.send_notif(agent, notif_msg=notification)
                sent = True
            if not sent:
                log.warning("nixl-push: %s was not told of %s", peer.engine, message.request_id)
                worker.xfer_stats.record_failed_notification()
        return None


class _Ears:
    """The library's agent, but that its notifications go through PushHalf."""

    def __init__(self, agent: Any, push: PushHalf) -> None:
        self._agent = agent
        self._push = push

    def get_new_notifs(self, *args: Any, **kwargs: Any) -> dict[str, list[bytes]]:
        # First what may fail: nothing that was taken from the library must be lost with it.
        self._push.work()
        return self._push.hear(self._agent.get_new_notifs(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)


class _Ticking(threading.Event):
    """Upstream's wake-up: an idle writer thread would else not look for notifications until the engine's next step."""

    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(POLL_SECONDS if timeout is None else timeout)


def _installing(original: Callable[..., None]) -> Callable[..., None]:
    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        push = PushHalf(self)
        setattr(self, ATTRIBUTE, push)
        self.nixl_wrapper = _Ears(self.nixl_wrapper, push)
        self._push_writer_wake = _Ticking()

    return initialize


def _taking_orders(original: Callable[..., None]) -> Callable[..., None]:
    def start_load_kv(self: Any, metadata: Any) -> None:
        push: PushHalf = getattr(self, ATTRIBUTE)
        finished = metadata.push_finished_blocks
        if unwanted := push.writes.begin_step(finished, metadata.reqs_not_processed):
            metadata.push_finished_blocks = {name: finished[name] for name in finished if name not in unwanted}
        original(self, metadata)
        push.withdrawals.order(getattr(metadata, ORDERS, ()), getattr(metadata, RELEASES, ()))

    return start_load_kv


def _ending_leases(original: Callable[..., None]) -> Callable[..., None]:
    def reap(self: Any, done_sending: set[str]) -> None:
        getattr(self, ATTRIBUTE).writes.end_leases(lambda done: original(self, done), done_sending)

    return reap


def _ending_writes(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_transfer_results(self: Any) -> Any:
        push: PushHalf = getattr(self, ATTRIBUTE)
        results = push.writes.end_writes(lambda: original(self))
        push.withdrawals.received(results.finished_recving)
        return results

    return get_transfer_results


def _beginning_writes(original: Callable[..., None]) -> Callable[..., None]:
    def start_push(self: Any, request_id: str, local_block_ids: Any, registration_data: dict[str, Any]) -> None:
        begin = getattr(self, ATTRIBUTE).writes.begin
        begin(lambda *args: original(self, *args), request_id, local_block_ids, registration_data)

    return start_push


def _taking_registrations(original: Callable[..., None]) -> Callable[..., None]:
    def handle_push_reg_notif(self: Any, notif: bytes) -> None:
        getattr(self, ATTRIBUTE).writes.registered(lambda: original(self, notif), _read(notif))

    return handle_push_reg_notif


def _read(notif: bytes) -> Any:
    """The registration. None: it cannot be read, which upstream logs."""
    import msgspec
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import PUSH_REG_NOTIF_PREFIX

    try:
        return msgspec.msgpack.decode(notif[len(PUSH_REG_NOTIF_PREFIX) :])
    except msgspec.DecodeError:
        return None


def _sending_what_is_wanted(original: Callable[..., None]) -> Callable[..., None]:
    def send_registration(self: Any, req_id: str, reg_data: dict[str, Any]) -> None:
        if getattr(self, ATTRIBUTE).withdrawals.may_send(req_id):
            original(self, req_id, reg_data)

    return send_registration


def _remembering_what_is_sent(original: Callable[..., None]) -> Callable[..., None]:
    def send_notif(self: Any, req_id: str, reg_data: dict[str, Any]) -> None:
        getattr(self, ATTRIBUTE).withdrawals.sends(req_id, reg_data)
        original(self, req_id, reg_data)

    return send_notif


def _of_both_ids(original: Callable[..., None]) -> Callable[..., None]:
    def handle_heartbeat(self: Any, payload: str) -> None:
        original(self, getattr(self, ATTRIBUTE).writes.heartbeat(payload))

    return handle_heartbeat


def _closing(original: Callable[..., None]) -> Callable[..., None]:
    def shutdown(self: Any) -> None:
        if (push := getattr(self, ATTRIBUTE, None)) is not None:
            push.withdrawals.close()
        original(self)

    return shutdown


METHODS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "__init__": _installing,
    "start_load_kv": _taking_orders,
    "_reap_expired_send_leases": _ending_leases,
    "get_transfer_results": _ending_writes,
    "_do_start_push_kv": _beginning_writes,
    "_handle_push_reg_notif": _taking_registrations,
    "_send_registration_to_p": _sending_what_is_wanted,
    "_do_send_reg_notif": _remembering_what_is_sent,
    "_handle_heartbeat": _of_both_ids,
    "shutdown": _closing,
}
"""What is wrapped of NixlPushConnectorWorker, and how."""
