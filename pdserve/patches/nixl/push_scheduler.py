"""The scheduler half of nixl-push: which requests of decode wait for KV no longer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdserve.patches import effects
from pdserve.patches.nixl.push_messages import PushPeer
from pdserve.patches.nixl.push_prefill import NAME

EXPIRED, WITHDRAWN = "registrations-expired", "registrations-withdrawn"
"""What it counts."""
ORDERS, RELEASES = "pdserve_withdrawn", "pdserve_released"
"""Attributes of the scheduler half, and of the metadata that goes to its workers."""


def _naming_itself(original: Callable[..., None]) -> Callable[..., None]:
    def on_new_request(self: Any, request: Any) -> None:
        params = request.kv_transfer_params
        if params and params.get("do_remote_prefill"):
            params["remote_request_id"] = request.request_id
        original(self, request)

    return on_new_request


def _withdrawing(original: Callable[..., Any]) -> Callable[..., Any]:
    def request_finished(self: Any, request: Any, block_ids: Any) -> Any:
        name, params = request.request_id, request.kv_transfer_params
        waits = name in self._push_registration_deadlines
        unscheduled = bool(params and params.get("do_remote_prefill"))
        result = original(self, request, block_ids)
        if waits:
            self._push_pending_registrations.pop(name, None)
            self.__dict__.setdefault(ORDERS, []).append(name)
            effects.count(NAME, WITHDRAWN)
        elif unscheduled:
            # Upstream would have each worker keep an entry of it for ever.
            self._reqs_need_recv.pop(name, None)
            _release(self, name, params)
        return result

    return request_finished


def _releasing_what_is_not_needed(original: Callable[..., None]) -> Callable[..., None]:
    def update_state_after_alloc(self: Any, request: Any, blocks: Any, num_external_tokens: int) -> None:
        original(self, request, blocks, num_external_tokens)
        params = request.kv_transfer_params
        if params and params.get("do_remote_prefill") and num_external_tokens <= 0:
            # Decode has all of it already. Its heartbeats would extend prefill's lease until it has answered.
            self._stop_heartbeat(request.request_id)
            params["do_remote_prefill"] = False
            _release(self, request.request_id, params)

    return update_state_after_alloc


def _ordering(original: Callable[..., Any]) -> Callable[..., Any]:
    def build_connector_meta(self: Any, scheduler_output: Any) -> Any:
        before = tuple(self._push_registration_deadlines)
        meta = original(self, scheduler_output)
        expired = [name for name in before if name not in self._push_registration_deadlines]
        effects.count(NAME, EXPIRED, len(expired))
        if orders := [*self.__dict__.pop(ORDERS, ()), *expired]:
            setattr(meta, ORDERS, orders)
        if releases := self.__dict__.pop(RELEASES, None):
            setattr(meta, RELEASES, releases)
        return meta

    return build_connector_meta


def _release(half: Any, name: str, params: dict[str, Any]) -> None:
    """Prefill is told that nobody waits for its KV."""
    if (peer := _prefill_in(params)) is not None:
        tp = half.vllm_config.parallel_config.tensor_parallel_size
        here = PushPeer(half.engine_id, half.side_channel_host, half.side_channel_port, tp)
        half.__dict__.setdefault(RELEASES, []).append((name, peer, here))


def _prefill_in(params: dict[str, Any]) -> PushPeer | None:
    try:
        return PushPeer.prefill_of(
            {
                "remote_engine_id": params["remote_engine_id"],
                "remote_host": params["remote_host"],
                "remote_port": params["remote_port"],
                "remote_tp_size": params["tp_size"],
                "remote_pp_size": params.get("pp_size"),
            }
        )
    except (KeyError, TypeError, ValueError):
        return None


METHODS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "on_new_request": _naming_itself,
    "update_state_after_alloc": _releasing_what_is_not_needed,
    "request_finished": _withdrawing,
    "build_connector_meta": _ordering,
}
"""What is wrapped of NixlPushConnectorScheduler, and how."""
