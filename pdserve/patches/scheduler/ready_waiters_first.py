"""Patch ready-waiters-first: a request whose KV has arrived does not wait behind a request without KV or room."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdserve.patches import effects
from pdserve.patches.patch import Patch, PatchTarget
from pdserve.patches.wrap import wrap

NAME = "ready-waiters-first"
_RANGE = "<0.31"


def apply() -> None:
    """Wraps three methods of Scheduler; matters in EngineCore."""
    from vllm.v1.core.sched.scheduler import Scheduler

    wrap(Scheduler, "__init__", patch=NAME, around=_two_lanes)
    wrap(Scheduler, "schedule", patch=NAME, around=_sorting_first)
    wrap(Scheduler, "_select_waiting_queue_for_scheduling", patch=NAME, around=_ready_lane_first)


def _two_lanes(original: Callable[..., None]) -> Callable[..., None]:
    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        from vllm.v1.core.sched.request_queue import create_request_queue

        from pdserve.patches.scheduler.two_lane_queue import two_lane_queue

        original(self, *args, **kwargs)
        if self.connector is not None:
            self.skipped_waiting = two_lane_queue(lambda: create_request_queue(self.policy))

    return initialize


def _sorting_first(original: Callable[..., Any]) -> Callable[..., Any]:
    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.connector is not None:
            overtakings = self.skipped_waiting.sort(
                lambda request: _holds_arrived_kv(self, request), lambda request: _yields(self, request)
            )
            effects.count(NAME, "overtakings", overtakings)
        return original(self, *args, **kwargs)

    return schedule


def _ready_lane_first(original: Callable[..., Any]) -> Callable[..., Any]:
    def _select_waiting_queue_for_scheduling(self: Any) -> Any:
        skipped = self.skipped_waiting
        return skipped if self.connector is not None and skipped.first_lane else original(self)

    return _select_waiting_queue_for_scheduling


def _holds_arrived_kv(scheduler: Any, request: Any) -> bool:
    """Whether it has blocks of an ended transfer and waits for nothing but its turn."""
    if request.status.name == "WAITING_FOR_REMOTE_KVS":
        # Also if the transfer has failed: its turn is when it returns the blocks.
        return request.request_id in scheduler.finished_recving_kv_req_ids
    # It had its turn in an earlier step, and what it needs beside the loaded KV was not free.
    return request.status.name in ("WAITING", "PREEMPTED") and request.num_computed_tokens > 0


def _yields(scheduler: Any, request: Any) -> bool:
    """Whether a fresh request would come before it: with priorities only; else those that were skipped come first."""
    if scheduler.policy.name != "PRIORITY" or not scheduler.waiting:
        return False
    return bool(scheduler.waiting.peek_request() < request)


_SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"

PATCH = Patch(
    name=NAME,
    behaviour="KV memory deadlock",
    summary=(
        "A queue head that finds no room ends the step. If those behind it hold the blocks, with their KV loaded, "
        "nothing ever runs again: a deadlock under KV pressure. Those whose KV has arrived are scheduled before fresh "
        "admissions; among themselves, and else, the order stays."
    ),
    issue="https://github.com/vllm-project/vllm/pull/57841",
    vllm=_RANGE,
    targets=(
        PatchTarget(f"{_SCHEDULER}.__init__"),
        PatchTarget(f"{_SCHEDULER}.schedule"),
        PatchTarget(f"{_SCHEDULER}._select_waiting_queue_for_scheduling", body=True, only=_RANGE),
        PatchTarget(f"{_SCHEDULER}._try_promote_blocked_waiting_request", body=True, only=_RANGE),
    ),
    runs_in=("engine-core",),
    required=True,
    effects={"overtakings": "requests with loaded KV that were put before others without"},
    remove_when="vllm 0.31 is the oldest supported version: its queue kv_holding_waiting does the same",
    apply=apply,
)
