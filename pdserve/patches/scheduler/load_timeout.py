"""Patch load-timeout: a load of external KV that hangs does not keep its request waiting for ever."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pdserve.errors import StartError
from pdserve.patches import effects
from pdserve.patches.patch import Patch, PatchTarget, wrap
from pdserve.patches.scheduler.stale_completions import only_sends


class Quarantine:
    """Holds one reference to each block in vLLM's BlockPool, so that the pool cannot hand it out again.

    Blocks are held by request id: a connector reports nothing else when a transfer has ended. A block that others share
    (a local prefix) stays theirs: a reference more does not hide it from the prefix cache.
    """

    def __init__(self, pool: Any, *, on_change: Callable[[int], None]) -> None:
        """Begin empty. `pool`: BlockPool. `on_change` gets the number of blocks held, after every change."""
        self._pool = pool
        self._on_change = on_change
        self._held: dict[str, list[Any]] = {}
        self.request_ids = self._held.keys()
        """The request ids of transfers that have not ended, as of now. Cheap to look at in every step."""

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held

    def __len__(self) -> int:
        """Return how many transfers have not ended."""
        return len(self._held)

    def hold(self, request_id: str, blocks: Iterable[Any]) -> None:
        """Take KVCacheBlocks over. Call it before their request lets go of them; one transfer a request."""
        if request_id in self._held:
            raise ValueError(f"{request_id} has a transfer in quarantine already")
        # The null block stands for positions without KV, in every request.
        own = [block for block in blocks if not block.is_null]
        self._pool.touch(own)
        self._held[request_id] = own
        self._on_change(self.num_blocks)

    def release(self, request_id: str) -> None:
        """Give the blocks of a transfer that has ended back to the pool. They were never hashed, so none is a cache
        hit."""
        # The tail first, as vLLM frees a request: it is evicted before the prefix that others may want.
        self._pool.free_blocks(reversed(self._held.pop(request_id)))
        self._on_change(self.num_blocks)

    @property
    def num_blocks(self) -> int:
        """Return how many references are held."""
        return sum(len(blocks) for blocks in self._held.values())

    @property
    def block_ids(self) -> frozenset[int]:
        """Return the ids of all blocks that are held."""
        return frozenset(block.block_id for blocks in self._held.values() for block in blocks)


NAME = "load-timeout"
"""The patch that all of this belongs to."""
SETTING = "load_timeout_seconds"
"""Seconds, in the top-level kv_connector_extra_config."""
_SINCE = "pdserve_loading_since"
"""Attribute of a request: when its latest load was seen for the first time, in seconds of the LoadTimeout's clock."""


class LoadTimeout:
    """The loads of one Scheduler. A step costs what has changed since the last one, however many loads are under way.

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
        """Give up every load that has been under way for too long. Called before each step is scheduled."""
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
        """Take out of a KVConnectorOutput what is about loads that were given up, before the Scheduler sees it."""
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
        """Yield requests whose transfer has been started and has not ended, in the order of their queue."""
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
        """Hear of loads. The scheduler notifies its connector of every load that it starts, and then lets the request
        wait."""
        connector = self._scheduler.connector
        original = connector.update_state_after_alloc

        def update_state_after_alloc(request: Any, blocks: Any, num_external_tokens: int) -> None:
            original(request, blocks, num_external_tokens)
            if num_external_tokens > 0:
                self._begun.append(request)

        connector.update_state_after_alloc = update_state_after_alloc


def _parked(scheduler: Any) -> Any:
    """Return the queue in which requests wait for their KV."""
    new = hasattr(scheduler, "kv_holding_waiting")  # vllm >= 0.31
    return scheduler.kv_holding_waiting if new else scheduler.skipped_waiting


def _status(request: Any, name: str) -> Any:
    """Return RequestStatus.NAME, without importing vLLM."""
    return type(request.status)[name]


def _forget(connector: Any, request: Any) -> None:
    """Make LMCache's trackers of the request start anew: else they would store the fresh KV from the old blocks.

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
    """Yield the connectors that MultiConnector combines, or the connector itself."""
    children = getattr(connector, "_connectors", None)
    if children is None:
        yield connector
    else:
        for child in children:
            yield from _leaves(child)


ATTRIBUTE = "pdserve_load_timeout"
"""Where a Scheduler has its LoadTimeout; absent when the setting is."""


def apply() -> None:
    """Wraps four methods of Scheduler; matters in EngineCore."""
    from vllm.v1.core.sched.scheduler import Scheduler

    wrap(Scheduler, "__init__", patch=NAME, around=_install_timeout)
    wrap(Scheduler, "schedule", patch=NAME, around=_give_up_first)
    wrap(Scheduler, "update_from_output", patch=NAME, around=_sift_first)
    wrap(Scheduler, "has_finished_requests", patch=NAME, around=_stay_awake)


def _install_timeout(original: Callable[..., None]) -> Callable[..., None]:
    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        config = self.vllm_config.kv_transfer_config
        seconds = None if config is None else config.kv_connector_extra_config.get(SETTING)
        if seconds is not None and self.connector is not None:
            setattr(self, ATTRIBUTE, LoadTimeout(self, float(seconds)))

    return initialize


def _give_up_first(original: Callable[..., Any]) -> Callable[..., Any]:
    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        timeout = getattr(self, ATTRIBUTE, None)
        if timeout is not None:
            timeout.give_up_overdue()
        return original(self, *args, **kwargs)

    return schedule


def _sift_first(original: Callable[..., Any]) -> Callable[..., Any]:
    # Here and not around _update_from_kv_xfer_finished: failures are handled before that is called, and another
    # patch drops stale completions in it, among which the end of a load that was given up would be.
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        timeout = getattr(self, ATTRIBUTE, None)
        if timeout is not None and model_runner_output.kv_connector_output is not None:
            timeout.sift(model_runner_output.kv_connector_output)
        return original(self, scheduler_output, model_runner_output)

    return update_from_output


def _stay_awake(original: Callable[..., bool]) -> Callable[..., bool]:
    # An engine without requests does not ask its workers what has ended.
    def has_finished_requests(self: Any) -> bool:
        timeout = getattr(self, ATTRIBUTE, None)
        return original(self) or (timeout is not None and len(timeout.quarantine) > 0)

    return has_finished_requests


_SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"

PATCH = Patch(
    name=NAME,
    behaviour="failed and late loads",
    summary=(
        "A request whose external KV does not come waits as long as its connector does: 480 s with Mooncake, for ever "
        "with LMCache. A load older than load_timeout_seconds is given up: the request computes in fresh blocks, and "
        "the old blocks stay unused until the connector reports the end of the transfer, never by time."
    ),
    issue="https://github.com/vllm-project/vllm/issues/49545",
    targets=(
        PatchTarget(f"{_SCHEDULER}.__init__"),
        PatchTarget(f"{_SCHEDULER}.schedule"),
        PatchTarget(f"{_SCHEDULER}.update_from_output"),
        PatchTarget(f"{_SCHEDULER}.has_finished_requests"),
        # Not wrapped, but what a load that waits looks like is known from their bodies.
        PatchTarget(f"{_SCHEDULER}._update_from_kv_xfer_finished", body=True),
        PatchTarget(f"{_SCHEDULER}._update_waiting_for_remote_kv", body=True),
        PatchTarget("vllm.v1.core.kv_cache_manager.KVCacheManager.get_blocks"),
        PatchTarget("vllm.v1.core.kv_cache_manager.KVCacheManager.free"),
        PatchTarget("vllm.v1.core.block_pool.BlockPool.touch", body=True),
        PatchTarget("vllm.v1.core.block_pool.BlockPool.free_blocks", body=True),
    ),
    runs_in=("engine-core",),
    settings=frozenset({SETTING}),
    required=True,
    instead="leave load_timeout_seconds out",
    effects={
        "loads-given-up": "loads of external KV that took too long, whose requests were computed instead",
        "late-ends": "transfers that ended after they had been given up",
    },
    gauges={"quarantined-blocks": "KV blocks into which a transfer that was given up may still write"},
    remove_when="vLLM has a limit for external loads that keeps their blocks until the transfer has ended",
    apply=apply,
)
