"""The decisions of the patch load-timeout: which loads are given up, and what becomes of what they leave behind."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from pdserve.errors import StartError
from pdserve.patches import effects
from pdserve.patches.load_timeout import NAME, SETTING
from pdserve.patches.quarantine import Quarantine
from pdserve.patches.stale_completions import only_sends


class LoadTimeout:
    """Of one Scheduler. A request that has given up a load asks its connector no more: it computes to its end.

    Connectors and their workers know transfers by request id alone. A second load of an id while the first is under
    way could not be told from it, and LMCache's worker would lose the first.
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
        self._since: dict[Any, float] = {}
        self._given_up: dict[str, Any] = {}
        self._ask_for_others_only()

    def give_up_overdue(self) -> None:
        """Gives up every load that has been under way for too long. Called before each step is scheduled."""
        now = self.clock()
        self._since = {request: self._since.get(request, now) for request in self._loading()}
        self._given_up = {
            name: request for name, request in self._given_up.items() if self._scheduler.requests.get(name) is request
        }
        overdue = [request for request, since in self._since.items() if now - since >= self._seconds]
        # They go to the front one by one, so the last one first.
        for request in reversed(overdue):
            self._give_up(request)

    def sift(self, output: Any) -> None:
        """Takes out of a KVConnectorOutput what is about loads that were given up, before the Scheduler sees it."""
        received = set(output.finished_recving or ())
        if len(self.quarantine):
            # Their failure is no news: nobody waits for them, and no live request has these blocks for its own.
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

    def _loading(self) -> Iterator[Any]:
        """Requests whose transfer has been started and has not ended, in the order of their queue."""
        scheduler = self._scheduler
        not_started = getattr(scheduler, "deferred_loads", ())  # vllm >= 0.33
        for request in _parked(scheduler):
            name = request.request_id
            if request.status.name != "WAITING_FOR_REMOTE_KVS" or name in scheduler.finished_recving_kv_req_ids:
                continue
            if name not in not_started and name not in self.quarantine:
                yield request

    def _give_up(self, request: Any) -> None:
        scheduler, name = self._scheduler, request.request_id
        groups = scheduler.kv_cache_manager.get_blocks(name).blocks
        self.quarantine.hold(name, [block for group in groups for block in group])
        scheduler.kv_cache_manager.free(request)
        # As if it had never been admitted.
        request.num_computed_tokens = 0
        request.status = _status(request, "PREEMPTED" if request.num_preemptions else "WAITING")
        scheduler.failed_recving_kv_req_ids.discard(name)
        if hasattr(scheduler, "_inflight_prefills"):  # vllm >= 0.24
            scheduler._inflight_prefills.discard(request)
        if hasattr(scheduler, "_set_kv_fetch_stage"):  # vllm >= 0.31
            scheduler._set_kv_fetch_stage(request, None)
        # It holds nothing now, so it must not stand before those whose KV has arrived: if it does not fit, it would
        # keep them from running and from freeing what it needs.
        _parked(scheduler).remove_requests([request])
        getattr(scheduler, "deferred_waiting", set()).discard(request)  # vllm >= 0.31
        scheduler.waiting.prepend_request(request)
        del self._since[request]
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

        def get_num_new_matched_tokens(request: Any, num_computed_tokens: int) -> Any:
            if request.request_id in self._given_up or request.request_id in self.quarantine:
                _forget(connector, request)
                return 0, False
            return ask(request, num_computed_tokens)

        connector.get_num_new_matched_tokens = get_num_new_matched_tokens


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
    (LMCacheMPConnector._get_or_create_request_tracker, vllm 0.21 and every lmcache since 0.4.5). A tracker that is
    new already is left as it is.
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
