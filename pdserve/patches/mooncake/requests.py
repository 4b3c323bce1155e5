"""Patch mooncake-requests: any kv_transfer_params are survived, and a prefill that stops early delivers its KV.

kv_transfer_params come from a client, or from a router that has lost half of them. Upstream asserts on them in
schedule(), which ends EngineCore, or parks the request for KV that was never asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from pdserve.patches import effects
from pdserve.patches.patch import Patch, PatchTarget, wrap

_NAME = "mooncake-requests"
_SCHEDULER = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector.MooncakeConnectorScheduler"
_FOR_DECODE = ("transfer_id", "remote_engine_id", "remote_bootstrap_addr")
_FLAGS = ("do_remote_prefill", "do_remote_decode")
_SOUND = "pdserve_sound_params"
"""Attribute of a request: the kv_transfer_params that were checked and have no defect. Upstream only ever takes
do_remote_prefill back in them."""

log = logging.getLogger("pdserve.patches")


def apply() -> None:
    """Wraps what MooncakeConnectorScheduler does with a request's kv_transfer_params."""
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector

    owner = mooncake_connector.MooncakeConnectorScheduler
    wrap(owner, "get_num_new_matched_tokens", patch=_NAME, around=_nothing_to_load)
    wrap(owner, "update_state_after_alloc", patch=_NAME, around=_not_transferred)
    wrap(owner, "request_finished", patch=_NAME, around=_finished)
    if hasattr(owner, "on_new_request"):
        wrap(owner, "on_new_request", patch=_NAME, around=_not_transferred)


def defect(params: Any, *, producer: bool, consumer: bool) -> str | None:
    """Say why these kv_transfer_params can lead to no transfer at an engine of that role; None: they can, or need not.

    Any value may come in: a mapping that vLLM fills from `vllm_xargs` checks no types.
    """
    if params is None:
        return None
    if not isinstance(params, Mapping):  # an empty list too: upstream asks it for .get
        return f"kv_transfer_params is a {type(params).__name__}"
    for flag in _FLAGS:
        if params.get(flag) not in (None, False, True):
            return f"{flag} is neither true nor false"
    if params.get("do_remote_prefill"):
        if producer:
            return "do_remote_prefill was sent to a kv_producer"
        missing = [name for name in _FOR_DECODE if not _is_name(params.get(name))]
        if missing:
            return f"do_remote_prefill came without {' and '.join(missing)}"
    if params.get("do_remote_decode"):
        if consumer:
            return "do_remote_decode was sent to a kv_consumer"
        if not _is_name(params.get("transfer_id")):
            return "do_remote_decode came without transfer_id"
    return None


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _defect_of(scheduler: Any, request: Any) -> str | None:
    params = request.kv_transfer_params
    if params is None or getattr(request, _SOUND, None) is params:
        return None
    reason = defect(params, producer=scheduler.is_kv_producer, consumer=scheduler.is_kv_consumer)
    if reason is None:
        setattr(request, _SOUND, params)
    elif not isinstance(params, Mapping):
        # No connector can read it, and Scheduler.add_request (0.32) calls its .get: taken away where it is first seen.
        _log_defect(request, reason)
        request.kv_transfer_params = None
    return reason


def _log_defect(request: Any, reason: str) -> None:
    effects.count(_NAME, "params-rejected")
    log.warning("request %s is served without a KV transfer: %s", request.request_id, reason)


def _nothing_to_load(original: Callable[..., tuple[int, bool]]) -> Callable[..., tuple[int, bool]]:
    def get_num_new_matched_tokens(self: Any, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if _defect_of(self, request) is not None:
            return 0, False
        return original(self, request, num_computed_tokens)

    return get_num_new_matched_tokens


def _not_transferred(original: Callable[..., None]) -> Callable[..., None]:
    def unless_defect(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        if _defect_of(self, request) is None:
            original(self, request, *args, **kwargs)

    return unless_defect


def _finished(original: Callable[..., tuple[bool, Any]]) -> Callable[..., tuple[bool, Any]]:
    from vllm.v1.request import RequestStatus

    whole = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_REPETITION)

    def request_finished(self: Any, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, Any]:
        reason = _defect_of(self, request)
        if reason is not None:
            if request.kv_transfer_params is not None:
                _log_defect(request, reason)  # here: once for every request, whatever became of it
            return False, None
        params, status = request.kv_transfer_params, request.status
        if status not in whole or not params or not params.get("do_remote_decode"):
            return original(self, request, block_ids)
        # The KV of the prompt is as complete as after FINISHED_LENGTH_CAPPED, the only status that upstream sends
        # (vllm#46008). No other code sees the changed status: the scheduler has one thread.
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        try:
            kept = original(self, request, block_ids)
        finally:
            request.status = status
        effects.count(_NAME, "stopped-kept")
        return kept

    return request_finished


PATCH = Patch(
    name=_NAME,
    behaviour="abandoned transfers",
    summary=(
        "Incomplete or misdirected kv_transfer_params end EngineCore or park a request for ever: such a request is "
        "served without a transfer. A prefill whose token is a stop token dropped its KV and decode waited in vain: "
        "its KV is kept and sent."
    ),
    issue="https://github.com/vllm-project/vllm/issues/46008 (stop); parameters: not reported upstream",
    targets=(
        PatchTarget(f"{_SCHEDULER}.get_num_new_matched_tokens"),
        PatchTarget(f"{_SCHEDULER}.update_state_after_alloc"),
        PatchTarget(f"{_SCHEDULER}.on_new_request", only=">=0.30"),
        PatchTarget(f"{_SCHEDULER}.request_finished", body=True),
    ),
    runs_in=("engine-core",),
    connectors=frozenset({"MooncakeConnector"}),
    required=True,
    instead="connectors of kind nixl in place of mooncake",
    effects={
        "params-rejected": "requests served without a transfer because of their kv_transfer_params",
        "stopped-kept": "prefills that ended by a stop token or a repetition and whose KV was kept",
    },
    remove_when="MooncakeConnectorScheduler validates kv_transfer_params and keeps the KV of FINISHED_STOPPED",
    apply=apply,
)
