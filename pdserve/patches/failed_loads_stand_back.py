"""A request whose load has failed must not stop those whose load has arrived."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdserve.patches import effects
from pdserve.patches.patch import Patch, Target
from pdserve.patches.wrap import wrap

_NAME = "failed-loads-stand-back"
_RANGE = ">=0.31"


def apply() -> None:
    """Wraps Scheduler.schedule; acts in the EngineCore."""
    from vllm.v1.core.sched.scheduler import Scheduler

    wrap(Scheduler, "schedule", patch=_NAME, around=_standing_back_first)


def _standing_back_first(original: Callable[..., Any]) -> Callable[..., Any]:
    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        without = [request for request in self.kv_holding_waiting if not self._holds_kv_blocks(request)]
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
    behaviour="C",
    summary=(
        "A request whose load has failed as a whole gives its blocks back and keeps its place among those that hold "
        "some. If it finds no room to compute (hybrid models: that takes more than the load did), loads that have "
        "arrived behind it are never taken up and nothing runs. It goes to the front of those that hold none."
    ),
    issue="https://github.com/vllm-project/vllm/pull/57841",
    vllm=_RANGE,
    targets=(
        Target(f"{_SCHEDULER}.schedule"),
        Target(f"{_SCHEDULER}._holds_kv_blocks", body=True, only=_RANGE),
    ),
    runs_in=("engine-core",),
    required=False,
    effects={"stood-back": "requests whose load has failed that made way for those whose load has arrived"},
    remove_when="vLLM's kv_holding_waiting has no requests without blocks",
    apply=apply,
)
