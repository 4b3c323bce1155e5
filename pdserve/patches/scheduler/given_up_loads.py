"""The decisions of the patch load-timeout: which loads are given up, and what becomes of what they leave behind."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from pdserve.errors import StartError
from pdserve.patches import effects
from pdserve.patches.scheduler.quarantine import Quarantine
from pdserve.patches.scheduler.stale_completions import only_sends

NAME = "load-timeout"
"""The patch that all of this belongs to."""
SETTING = "load_timeout_seconds"
"""Seconds, in the top-level kv_connector_extra_config."""
_SINCE = "pdserve_loading_since"
"""Attribute of a request: when its latest load was seen for the first time, in seconds of the LoadTimeout's clock."""


class LoadTimeout:
    """Of one Scheduler. A step costs what has changed since the last one, however many loads are under way.

    A request that has given up a load asks its connector no more: it computes to its end.

    Connectors and their workers know transfers by request id alone. A second load of an id while the first is under
    way could not be distinguished from it, and LMCache's worker would lose the first.
    """

    def __init__(self, scheduler: Any, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        if not (math.isfinite(seconds) and seconds > 0):
            raise StartError(f"{SETTING} is {seconds}; it must be a positive number of seconds")
        self.clock = clock
        self.quarantine = Quarantine(
            scheduler.kv_cache_manager.block_pool,
            on_change=lambda blocks: effects.gauge(NAME, "quarantined-blocks", blocks),
        )
        self._scheduler = scheduler
        self._seconds = seconds
        self._begun: list[Any] = []
        """Requests that have got blocks for external KV, until it is known whether and when their transfer starts."""
        self._under_way: deque[tuple[float, str]] = deque()
        """(since, request id) of loads, the oldest first; also of some that have ended by now."""
        self._given_up: dict[str, Any] = {}
        self._ask_for_others_only()
        self._hear_of_loads()

    def give_up_overdue(self) -> None:
        """Gives up every load that has been under way for too long. Called before each step is scheduled."""
        now = self.clock()
        if self._begun:
            self._note_begun(now)
        if self._given_up:
            self._given_up = {
                name: request
                for name, request in self._given_up.items()
                if self._scheduler.requests.get(name) is request
            }
        due = set()
        while self._under_way and now - self._under_way[0][0] >= self._seconds:
            due.add(self._under_way.popleft())
        if not due:
            return
        # A request that has loaded again since has another time.
        overdue = [each for each in self._loading() if (getattr(each, _SINCE, None), each.request_id) in due]
        # They go to the front one by one, so the last one first.
        for request in reversed(overdue):
            self._give_up(request)

    def sift(self, output: Any) -> None:
        """Takes out of a KVConnectorOutput what is about loads that were given up, before the Scheduler sees it."""
        received = set(output.finished_recving or ())
        if len(self.quarantine):
            # Their failure changes nothing: no request waits for them, and no live request has these blocks.
            output.invalid_block_ids = set(output.invalid_block_ids) - self.quarantine.block_ids
            if getattr(output, "failed_recving", None):  # vllm >= 0.30
                output.failed_recving = {name for name in output.failed_recving if name not in self.quarantine}
            ended = {name for name in received if name in self.quarantine}
            if ended:
                received -= ended
                output.finished_recving = received
                self._end(ended, type(output))
        if received and output.finished_sending:
            # A request that was aborted during its load is deleted by the end of the load (see lmcache_lost_send), but
            # not by one that is reported again (see stale_completions).
            requests = self._scheduler.requests
            output.finished_sending = {
                name for name in output.finished_sending if name not in received or only_sends(requests.get(name))
            }

    def _note_begun(self, now: float) -> None:
        begun, self._begun = self._begun, []
        not_started = getattr(self._scheduler, "deferred_loads", ())  # vllm >= 0.33
        for request in begun:
            if not self._is_loading(request):
                continue
            if request.request_id in not_started:
                self._begun.append(request)
                continue
            setattr(request, _SINCE, now)
            self._under_way.append((now, request.request_id))

    def _loading(self) -> Iterator[Any]:
        """Requests whose transfer has been started and has not ended, in the order of their queue."""
        not_started = getattr(self._scheduler, "deferred_loads", ())  # vllm >= 0.33
        for request in _parked(self._scheduler):
            if self._is_loading(request) and request.request_id not in not_started:
                yield request

    def _is_loading(self, request: Any) -> bool:
        name = request.request_id
        return (
            request.status.name == "WAITING_FOR_REMOTE_KVS"
            and name not in self._scheduler.finished_recving_kv_req_ids
            and name not in self.quarantine
        )

    def _give_up(self, request: Any) -> None:
        scheduler, name = self._scheduler, request.request_id
        groups = scheduler.kv_cache_manager.get_blocks(name).blocks
        self.quarantine.hold(name, [block for group in groups for block in group])
        scheduler.kv_cache_manager.free(request)
        # As if it had never been admitted.
        request.num_computed_tokens = 0
        request.status = _status(request, "PREEMPTED" if request.num_preemptions else "WAITING")
        scheduler.failed_recving_kv_req_ids.discard(name)
        scheduler._inflight_prefills.discard(request)
        if hasattr(scheduler, "_set_kv_fetch_stage"):  # vllm >= 0.31
            scheduler._set_kv_fetch_stage(request, None)
        # It holds nothing now, so it must not stand before those whose KV has arrived: if it does not fit, it would
        # keep them from running and from freeing what it needs.
        _parked(scheduler).remove_requests([request])
        getattr(scheduler, "deferred_waiting", set()).discard(request)  # vllm >= 0.31
        scheduler.waiting.prepend_request(request)
        self._given_up[name] = request
        effects.count(NAME, "loads-given-up")

    def _end(self, names: set[str], output_class: type[Any]) -> None:
        for name in names:
            self.quarantine.release(name)
        effects.count(NAME, "late-ends", len(names))
        # The connector may keep something until then: NIXL its heartbeats. By its class, past what other patches put
        # around the method: for them these ends are stale.
        connector = self._scheduler.connector
        type(connector).update_connector_output(connector, output_class(finished_recving=set(names)))

    def _ask_for_others_only(self) -> None:
        connector = self._scheduler.connector
        ask = connector.get_num_new_matched_tokens
        quarantined = self.quarantine.request_ids

        def get_num_new_matched_tokens(request: Any, num_computed_tokens: int) -> Any:
            if request.request_id in self._given_up or request.request_id in quarantined:
                _forget(connector, request)
                return 0, False
            return ask(request, num_computed_tokens)

        connector.get_num_new_matched_tokens = get_num_new_matched_tokens

    def _hear_of_loads(self) -> None:
        """The scheduler notifies its connector of every load that it starts, and then lets the request wait."""
        connector = self._scheduler.connector
        original = connector.update_state_after_alloc

        def update_state_after_alloc(request: Any, blocks: Any, num_external_tokens: int) -> None:
            original(request, blocks, num_external_tokens)
            if num_external_tokens > 0:
                self._begun.append(request)

        connector.update_state_after_alloc = update_state_after_alloc


def _parked(scheduler: Any) -> Any:
    """The queue in which requests wait for their KV."""
    new = hasattr(scheduler, "kv_holding_waiting")  # vllm >= 0.31
    return scheduler.kv_holding_waiting if new else scheduler.skipped_waiting


def _status(request: Any, name: str) -> Any:
    """RequestStatus.NAME, without importing vLLM."""
    return type(request.status)[name]


def _forget(connector: Any, request: Any) -> None:
    """LMCache's trackers of the request start anew, else they would store the fresh KV from the old blocks.

    They do so themselves when they are asked for a request that was preempted, and only then
    (LMCacheMPConnector._get_or_create_request_tracker). A tracker that is new already is left as it is.
    """
    for child in _leaves(connector):
        if request.request_id in getattr(child, "request_trackers", ()):
            status, request.status = request.status, _status(request, "PREEMPTED")
            try:
                child._get_or_create_request_tracker(request)
            finally:
                request.status = status


def _leaves(connector: Any) -> Iterator[Any]:
    """The connectors that MultiConnector combines, or the connector itself."""
    children = getattr(connector, "_connectors", None)
    if children is None:
        yield connector
    else:
        for child in children:
            yield from _leaves(child)
