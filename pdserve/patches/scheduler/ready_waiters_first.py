"""Patch ready-waiters-first: a request whose KV has arrived does not wait behind a request without KV or room."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from pdserve.patches import effects
from pdserve.patches.patch import Patch, PatchTarget, wrap

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
    """Tell whether a request has blocks of an ended transfer and waits for nothing but its turn."""
    if request.status.name == "WAITING_FOR_REMOTE_KVS":
        # Also if the transfer has failed: its turn is when it returns the blocks.
        return request.request_id in scheduler.finished_recving_kv_req_ids
    # It had its turn in an earlier step, and what it needs beside the loaded KV was not free.
    return request.status.name in ("WAITING", "PREEMPTED") and request.num_computed_tokens > 0


def _yields(scheduler: Any, request: Any) -> bool:
    """Tell whether a fresh request would come before it: with priorities only; else those that were skipped do."""
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


def two_lane_queue(make: Callable[[], Any]) -> Any:
    """Return a RequestQueue of two that `make` makes, FCFS or priority; what is put in goes to the second lane."""
    from vllm.v1.core.sched.request_queue import RequestQueue

    class TwoLaneQueue(RequestQueue):  # type: ignore[misc]
        def __init__(self) -> None:
            self.first_lane = make()
            self.second_lane = make()

        def sort(self, first: Callable[[Any], bool], ahead: Callable[[Any], bool]) -> int:
            """Put the requests for which `first` holds into the first lane, others out of it. Return how many overtook.

            `ahead`: whether a request outside of this queue would have been served before that request.
            """
            demoted = [request for request in self.first_lane if not first(request)]
            promoted, standing, overtaking = [], len(demoted), 0
            for request in self.second_lane:
                if first(request):
                    promoted.append(request)
                    overtaking += standing > 0 or ahead(request)
                else:
                    standing += 1
            self.first_lane.remove_requests(demoted)
            self.second_lane.remove_requests(promoted)
            for request in reversed(demoted):
                self.second_lane.prepend_request(request)
            for request in promoted:
                self.first_lane.add_request(request)
            return overtaking

        @property
        def _served(self) -> Any:
            return self.first_lane or self.second_lane

        def add_request(self, request: Any) -> None:
            self.second_lane.add_request(request)

        def pop_request(self) -> Any:
            return self._served.pop_request()

        def peek_request(self) -> Any:
            return self._served.peek_request()

        def prepend_request(self, request: Any) -> None:
            self.second_lane.prepend_request(request)

        def prepend_requests(self, requests: Any) -> None:
            self.second_lane.prepend_requests(requests)

        def remove_request(self, request: Any) -> None:
            lane = self.first_lane if request in list(self.first_lane) else self.second_lane
            lane.remove_request(request)

        def remove_requests(self, requests: Iterable[Any]) -> None:
            leaving = list(requests)
            self.first_lane.remove_requests(leaving)
            self.second_lane.remove_requests(leaving)

        def __bool__(self) -> bool:
            return bool(self.first_lane) or bool(self.second_lane)

        def __len__(self) -> int:
            return len(self.first_lane) + len(self.second_lane)

        def __iter__(self) -> Iterator[Any]:
            return chain(self.first_lane, self.second_lane)

    return TwoLaneQueue()
