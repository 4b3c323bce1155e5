"""Requests whose KV is loaded must not be admitted beyond what the pool can finish.

Before 0.23 an external load got the blocks of the tokens to load, without regard to what other loads would still need
to get going. Loads that are under way or have arrived hold their blocks, no waiting request can take them away, and
when together they hold the pool none can go on: the engine stands still with nothing running. Loading less of each
request makes it worse. vllm#44560 reserves those blocks since 0.23, so there this patch is not applied.

Vehicle: once a scheduler is built, the bound `get_num_new_matched_tokens` of its connector is wrapped. Every fresh
request passes through that call, under any connector (MultiConnector, LMCacheMPConnector, MooncakeConnector), and its
answer (None, False) is upstream's own way to say "not yet": the request is skipped and does not stop those behind it,
among which are the loads that have arrived. `bind_gpu_block_pool` would need no wrapping but a subclass of each
connector, and 0.21's MultiConnector does not pass it on. A refusal from allocate_slots would stop the queue.

Nobody starves: once a request was deferred, all that follow it in that step are, so that none overtakes it; and with
nothing in flight nothing is deferred, so that a request alone fares as upstream, also one larger than the pool.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from pdserve.patches import effects
from pdserve.patches.patch import Patch, Target
from pdserve.patches.wrap import wrap

_NAME = "admission-gate"


def apply() -> None:
    """Wraps Scheduler.__init__, which runs in the EngineCore."""
    from vllm.v1.core.sched.scheduler import Scheduler

    wrap(Scheduler, "__init__", patch=_NAME, around=_with_gate)


def _with_gate(original: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.connector is not None:
            gate = Gate(self)
            wrap(self.connector, "get_num_new_matched_tokens", patch=_NAME, around=partial(_behind, gate))
            wrap(self.connector, "build_connector_meta", patch=_NAME, around=partial(_ending_a_pass, gate))

    return init


def _behind(gate: Gate, original: Callable[..., tuple[int | None, bool]]) -> Callable[..., tuple[int | None, bool]]:
    def get_num_new_matched_tokens(request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        # Asked before the connector is: a lookup would lock its hits for as long as the request waits.
        if not gate.admits(request, num_computed_tokens):
            return None, False
        return original(request, num_computed_tokens)

    return get_num_new_matched_tokens


def _ending_a_pass(gate: Gate, original: Callable[..., Any]) -> Callable[..., Any]:
    def build_connector_meta(scheduler_output: Any) -> Any:
        gate.new_pass()
        return original(scheduler_output)

    return build_connector_meta


class Gate:
    """Of one scheduler: which requests are on their way, and whether one more can be taken in beside them."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._in_flight: list[Any] = []
        """Requests that were let through and may need more blocks for the tokens that they have."""
        self._deferred: set[str] = set()
        """Requests that were counted as deferred and have not been let through since."""
        self._closed = False

    def new_pass(self) -> None:
        """The next request that is asked for is the first of the next step."""
        self._closed = False
        self._deferred &= self._scheduler.requests.keys()

    def admits(self, request: Any, num_computed_tokens: int) -> bool:
        """Whether the pool covers the whole request beside what those in flight need.

        `num_computed_tokens`: of its prefix in this engine's own cache.
        """
        if not self._closed and self._fits(request, num_computed_tokens):
            self._deferred.discard(request.request_id)
            self._in_flight.append(request)
            return True
        self._closed = True
        if request.request_id not in self._deferred:
            self._deferred.add(request.request_id)
            effects.count(_NAME, "admissions-deferred")
        return False

    def _fits(self, request: Any, num_computed_tokens: int) -> bool:
        self._in_flight = [each for each in self._in_flight if each is not request and self._is_in_flight(each)]
        if not self._in_flight:
            return True
        reserved = sum(self._missing_blocks(each, each.num_computed_tokens) for each in self._in_flight)
        free = self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks() - reserved
        if self._missing_blocks(request, num_computed_tokens) <= free:
            return True
        # Cached blocks that another request holds are not taken from the free ones.
        return num_computed_tokens > 0 and self._missing_blocks(request, num_computed_tokens, cached=True) <= free

    def _is_in_flight(self, request: Any) -> bool:
        """Whether it holds blocks and may not go on without more."""
        if self._scheduler.requests.get(request.request_id) is not request or request.is_finished():
            return False
        if not any(self._scheduler.kv_cache_manager.coordinator.get_blocks(request.request_id)):
            return False
        # A running one that lacks nothing is decoding: it can be preempted, and takes others' blocks if it needs any.
        return request.status.name != "RUNNING" or self._missing_blocks(request, request.num_computed_tokens) > 0

    def _missing_blocks(self, request: Any, num_computed_tokens: int, *, cached: bool = False) -> int:
        """Blocks that the request has still to get for all of its tokens."""
        scheduler, manager = self._scheduler, self._scheduler.kv_cache_manager
        tokens = min(request.num_tokens + scheduler.num_lookahead_tokens, scheduler.max_model_len)
        hit = manager.empty_kv_cache_blocks.blocks
        if cached:
            hit, _ = manager.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
        return int(
            manager.coordinator.get_num_blocks_to_allocate(
                request_id=request.request_id,
                num_tokens=tokens,
                new_computed_blocks=hit,
                num_encoder_tokens=0,
                total_computed_tokens=num_computed_tokens,
                num_tokens_main_model=tokens,
                apply_admission_cap=True,
            )
        )


_CORE = "vllm.v1.core."
_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1"

PATCH = Patch(
    name=_NAME,
    behaviour="C",
    summary=(
        "Loads of external KV are admitted until together they hold the pool and none can go on: the engine stands "
        "still. A request waits until free blocks, less what those in flight still need, cover all of it. Not applied "
        "since 0.23, whose scheduler reserves those blocks itself (vllm#44560)."
    ),
    issue="https://github.com/vllm-project/vllm/pull/44560",
    vllm="<0.23",
    targets=(
        Target(f"{_CORE}sched.scheduler.Scheduler.__init__", only="<0.23"),
        Target(f"{_BASE}.get_num_new_matched_tokens"),
        Target(f"{_BASE}.build_connector_meta"),
        Target(f"{_CORE}kv_cache_coordinator.KVCacheCoordinator.get_num_blocks_to_allocate", only="<0.23"),
        Target(f"{_CORE}kv_cache_coordinator.KVCacheCoordinator.find_longest_cache_hit", only="<0.23"),
    ),
    runs_in=("engine-core",),
    required=True,
    effects={"admissions-deferred": "requests that had to wait until loads under way can be finished"},
    remove_when="vllm 0.23 is the oldest supported version",
    apply=apply,
)
