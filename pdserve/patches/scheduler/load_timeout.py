"""Patch load-timeout: a load of external KV that hangs does not keep its request waiting for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdserve.patches.patch import Patch, PatchTarget
from pdserve.patches.scheduler.given_up_loads import NAME, SETTING, LoadTimeout
from pdserve.patches.wrap import wrap

ATTRIBUTE = "pdserve_load_timeout"
"""Where a Scheduler has its LoadTimeout; absent when the setting is."""


def apply() -> None:
    """Wraps four methods of Scheduler; matters in EngineCore."""
    from vllm.v1.core.sched.scheduler import Scheduler

    wrap(Scheduler, "__init__", patch=NAME, around=_installing)
    wrap(Scheduler, "schedule", patch=NAME, around=_giving_up_first)
    wrap(Scheduler, "update_from_output", patch=NAME, around=_sifting_first)
    wrap(Scheduler, "has_finished_requests", patch=NAME, around=_awake)


def _installing(original: Callable[..., None]) -> Callable[..., None]:
    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        config = self.vllm_config.kv_transfer_config
        seconds = None if config is None else config.kv_connector_extra_config.get(SETTING)
        if seconds is not None and self.connector is not None:
            setattr(self, ATTRIBUTE, LoadTimeout(self, float(seconds)))

    return initialize


def _giving_up_first(original: Callable[..., Any]) -> Callable[..., Any]:
    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        timeout = getattr(self, ATTRIBUTE, None)
        if timeout is not None:
            timeout.give_up_overdue()
        return original(self, *args, **kwargs)

    return schedule


def _sifting_first(original: Callable[..., Any]) -> Callable[..., Any]:
    # Here and not around _update_from_kv_xfer_finished: failures are handled before that is called, and another
    # patch drops stale completions in it, among which the end of a load that was given up would be.
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        timeout = getattr(self, ATTRIBUTE, None)
        if timeout is not None and model_runner_output.kv_connector_output is not None:
            timeout.sift(model_runner_output.kv_connector_output)
        return original(self, scheduler_output, model_runner_output)

    return update_from_output


def _awake(original: Callable[..., bool]) -> Callable[..., bool]:
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
