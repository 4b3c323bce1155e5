"""Patch lmcache-lost-send: the end of a save is reported also when a load of its request is dropped with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdserve.patches import effects
from pdserve.patches.lmcache.clients import ADAPTERS, HOOK, once_loaded
from pdserve.patches.patch import Patch, PatchTarget, wrap
from pdserve.patches.scheduler.load_timeout import SETTING

NAME = "lmcache-lost-send"
_FINISHED = "pdserve_finished_stores"

Finished = tuple[set[str] | None, set[str] | None]
"""Ids of saves and of loads that have ended."""


def apply() -> None:
    """Wraps two methods of LMCacheMPWorkerAdapter as soon as vLLM has imported it; matters in the workers."""
    once_loaded(NAME, _wrap_adapter)


def _wrap_adapter() -> None:
    from lmcache.integration.vllm.vllm_multi_process_adapter import LMCacheMPWorkerAdapter

    wrap(LMCacheMPWorkerAdapter, "_process_finished_stores", patch=NAME, around=_remembering)
    wrap(LMCacheMPWorkerAdapter, "get_finished", patch=NAME, around=_with_all_sends)


def _remembering(original: Callable[..., set[str]]) -> Callable[..., set[str]]:
    def process_finished_stores(self: Any, *args: Any, **kwargs: Any) -> set[str]:
        finished = original(self, *args, **kwargs)
        # A copy: get_finished takes ids out of the set itself.
        setattr(self, _FINISHED, frozenset(finished))
        return finished

    return process_finished_stores


def _with_all_sends(original: Callable[..., Finished]) -> Callable[..., Finished]:
    def get_finished(self: Any, *args: Any, **kwargs: Any) -> Finished:
        setattr(self, _FINISHED, frozenset())
        sends, loads = original(self, *args, **kwargs)
        lost = getattr(self, _FINISHED) - (sends or set())
        effects.count(NAME, "sends-reported", len(lost))
        return ({*(sends or ()), *lost} if lost else sends), loads

    return get_finished


_ADAPTER = f"{ADAPTERS}.LMCacheMPWorkerAdapter"

PATCH = Patch(
    name=NAME,
    behaviour="failed and late loads",
    summary=(
        "When its server is lost, LMCache's worker drops all transfers; of a request with a load and a save among them "
        "it reports the load alone, because that frees the request. A request that has given up its load "
        "(load-timeout) is not freed by it and would keep its blocks for ever."
    ),
    issue="https://github.com/LMCache/LMCache/issues/5047",
    targets=(
        HOOK,
        PatchTarget(f"{_ADAPTER}._process_finished_stores"),
        PatchTarget(f"{_ADAPTER}.get_finished"),
    ),
    runs_in=("worker",),
    connectors=frozenset({"LMCacheMPConnector"}),
    settings=frozenset({SETTING}),
    required=True,
    serves_without=("a request that has given up its load keeps its blocks for ever when its LMCache server dies"),
    effects={"sends-reported": "ends of saves that would have been dropped with a load"},
    remove_when="load-timeout is removed",
    apply=apply,
)
