"""Patch failed-loads-stand-back: a request whose load has failed stops no load that has arrived, nor its own next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdserve.patches import effects
from pdserve.patches.patch import Patch, PatchTarget, wrap

_NAME = "failed-loads-stand-back"
_OWN_QUEUE = ">=0.31"
"""Versions with a queue of its own for requests that hold blocks."""


def apply() -> None:
    """Wraps two methods of Scheduler; acts in the EngineCore."""
    from vllm.v1.core.sched.scheduler import Scheduler

    wrap(Scheduler, "_update_waiting_for_remote_kv", patch=_NAME, around=_without_reservation)
    if hasattr(Scheduler, "_holds_kv_blocks"):  # vllm >= 0.31
        wrap(Scheduler, "schedule", patch=_NAME, around=_standing_back_first)


def _without_reservation(original: Callable[..., None]) -> Callable[..., None]:
    def update_waiting_for_remote_kv(self: Any, request: Any) -> None:
        failed = request.request_id in self.failed_recving_kv_req_ids
        original(self, request)
        if failed and not request.num_computed_tokens and request in self._inflight_prefills:
            # Its blocks are free again. If it still counted, another load of it would have to fit beside itself.
            self._inflight_prefills.discard(request)
            effects.count(_NAME, "reservations-dropped")

    return update_waiting_for_remote_kv


def _standing_back_first(original: Callable[..., Any]) -> Callable[..., Any]:
    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        # What has computed or loaded tokens holds blocks: no call for each of those that wait for their KV.
        without = [
            request
            for request in self.kv_holding_waiting
            if request.num_computed_tokens <= 0 and not self._holds_kv_blocks(request)
        ]
        if without:
            self.kv_holding_waiting.remove_requests(without)
            for request in reversed(without):
                self.waiting.prepend_request(request)
            effects.count(_NAME, "stood-back", len(without))
        return original(self, *args, **kwargs)

    return schedule


_SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"

PATCH = Patch(
    name=_NAME,
    behaviour="KV memory deadlock",
    summary=(
        "A request whose load has failed as a whole gives its blocks back, but keeps its place among those that hold "
        "some (vllm 0.31 on) and its reservation. If it finds no room, loads that arrived behind it are never "
        "taken up, and a load offered again must fit beside itself. It goes to the front of those that hold none."
    ),
    issue="https://github.com/vllm-project/vllm/pull/57841",
    targets=(
        PatchTarget(f"{_SCHEDULER}.schedule"),
        PatchTarget(f"{_SCHEDULER}._update_waiting_for_remote_kv", body=True),
        PatchTarget(f"{_SCHEDULER}._holds_kv_blocks", body=True, only=_OWN_QUEUE),
    ),
    runs_in=("engine-core",),
    required=False,
    effects={
        "stood-back": "requests whose load has failed that made way for those whose load has arrived",
        "reservations-dropped": "reservations of requests dropped because their load has failed as a whole",
    },
    remove_when="vLLM's kv_holding_waiting and _inflight_prefills have no waiting requests without blocks",
    apply=apply,
)
