"""Patch stale-completions: a late or doubled notification of a KV transfer ends no engine and frees no block in use.

Where the guard stands: behind `connector.update_connector_output`, before the scheduler's own loops. So the connector
hears every report of its workers, and what it adds itself (MoRIIO does, from 0.27 on) is looked at too. Another wrapper
around `_update_from_kv_xfer_finished` sees the raw sets, whichever of the two was applied first.

What it cannot distinguish, because a notification carries an id alone: a late one of an earlier load from that of the
load that the same request waits for now. Code that lets a request load twice has to settle that before the scheduler
sees it. A request that is finished and never loaded is freed by a load's report as upstream does it: with LMCache,
whose server is gone, that report comes instead of the one about the store (lmcache 0.5.6, `get_finished`). LMCache
reports each load once, so that one about a request whose loads have all been reported is no such report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from pdserve.patches import effects
from pdserve.patches.patch import Patch, PatchTarget, wrap

_NAME = "stale-completions"
_LOADING = "pdserve_still_loading"
"""Attribute of a request that ended while its load was under way: its blocks belong to that load until it reports."""
_LOADED = "pdserve_load_reported"
"""Attribute of a request of which the end of a load was taken."""


def apply() -> None:
    """Wraps two methods of Scheduler; they act in the EngineCore."""
    from vllm.v1.core.sched.scheduler import Scheduler

    wrap(Scheduler, "_update_from_kv_xfer_finished", patch=_NAME, around=_guarded)
    wrap(Scheduler, "_free_request", patch=_NAME, around=_marking)


def _guarded(original: Callable[..., None]) -> Callable[..., None]:
    def update_from_kv_xfer_finished(self: Any, kv_connector_output: Any) -> None:
        if self.connector is None:
            _drop_stale(self, kv_connector_output)
        else:
            wrap(self.connector, "update_connector_output", patch=_NAME, around=partial(_then_drop_stale, self))
        original(self, kv_connector_output)

    return update_from_kv_xfer_finished


def _then_drop_stale(scheduler: Any, original: Callable[..., None]) -> Callable[..., None]:
    def update_connector_output(connector_output: Any) -> None:
        original(connector_output)
        _drop_stale(scheduler, connector_output)

    return update_connector_output


def _marking(original: Callable[..., Any]) -> Callable[..., Any]:
    def free_request(self: Any, request: Any, delay_free_blocks: bool = False) -> Any:
        # finish_requests passes True for exactly those whose load has not reported yet, and changes their status.
        if delay_free_blocks:
            setattr(request, _LOADING, True)
        return original(self, request, delay_free_blocks=delay_free_blocks)

    return free_request


def _drop_stale(scheduler: Any, output: Any) -> None:
    """Leaves in the output what the scheduler's loops can take."""
    if output.finished_recving:
        output.finished_recving = _received(scheduler.requests, output.finished_recving)
    if output.finished_sending:
        output.finished_sending = _sent(scheduler.requests, output.finished_sending, output.finished_recving or ())


def _received(requests: dict[str, Any], reported: Iterable[str]) -> set[str]:
    kept = set()
    for name in reported:
        request = requests.get(name)
        if request is None:
            effects.count(_NAME, "loads-of-gone-requests")
        elif request.status.name == "WAITING_FOR_REMOTE_KVS":
            setattr(request, _LOADED, True)
            kept.add(name)
        elif not request.is_finished():
            effects.count(_NAME, "loads-of-live-requests")
        elif only_sends(request):
            # Its blocks are still being sent: upstream would free them.
            effects.count(_NAME, "loads-of-sending-requests")
        else:
            kept.add(name)
    return kept


def only_sends(request: Any) -> bool:
    """Tell whether a request has loaded, and the end of every load of it was taken; asked of one that has ended."""
    return bool(getattr(request, _LOADED, False)) and not getattr(request, _LOADING, False)


def _sent(requests: dict[str, Any], reported: Iterable[str], received: Iterable[str]) -> set[str]:
    kept = set()
    for name in reported:
        request = requests.get(name)
        if request is None:
            effects.count(_NAME, "sends-of-gone-requests")
        elif not request.is_finished():
            effects.count(_NAME, "sends-of-live-requests")
        elif name in received:
            # The loop over loads, which comes first, frees and forgets it.
            effects.count(_NAME, "sends-with-a-load")
        elif getattr(request, _LOADING, False):
            effects.count(_NAME, "sends-before-a-load")
        else:
            kept.add(name)
    return kept


_SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler."

PATCH = Patch(
    name=_NAME,
    behaviour="stale completions",
    summary=(
        "The scheduler asserts that a finished KV transfer belongs to a request that waits for it; a late or doubled "
        "notification kills EngineCore, and one about a request that has ended frees blocks that a load still writes "
        "to, or that are still being sent. Such notifications are dropped and counted."
    ),
    issue="https://github.com/vllm-project/vllm/issues/46240",
    targets=(
        # body: update_connector_output comes before the loops, loads before sends.
        PatchTarget(f"{_SCHEDULER}_update_from_kv_xfer_finished", body=True),
        PatchTarget(f"{_SCHEDULER}_free_request"),
        PatchTarget("vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1.update_connector_output"),
    ),
    runs_in=("engine-core",),
    required=True,
    effects={
        "loads-of-gone-requests": "notifications of finished loads dropped because the request is gone",
        "loads-of-live-requests": "notifications of finished loads dropped because the request does not wait for one",
        "loads-of-sending-requests": "notifications of finished loads dropped because the request only sends any more",
        "sends-of-gone-requests": "notifications of finished sends dropped because the request is gone",
        "sends-of-live-requests": "notifications of finished sends dropped because the request has not finished",
        "sends-with-a-load": "notifications of finished sends dropped because a load's frees the request already",
        "sends-before-a-load": "notifications of finished sends dropped because a load still writes to the blocks",
    },
    remove_when="vLLM's scheduler ignores notifications about requests that have moved on (refused so far, vllm#53079)",
    apply=apply,
)
