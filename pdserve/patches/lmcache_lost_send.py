"""The end of a save must be reported also when a load of the same request is dropped with it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from pdserve.patches import effects
from pdserve.patches.load_timeout import SETTING
from pdserve.patches.patch import Patch, Target
from pdserve.patches.wrap import wrap

NAME = "lmcache-lost-send"
_FINISHED = "pdserve_finished_stores"
_MODULE = "lmcache.integration.vllm.vllm_multi_process_adapter"

Finished = tuple[set[str] | None, set[str] | None]
"""Ids of saves and of loads that have ended."""


def apply() -> None:
    """Wraps two methods of LMCacheMPWorkerAdapter as soon as vLLM has imported it; matters in the workers.

    Not before: lmcache brings numba, and vLLM's CPU worker then fails at the registration of its kernels
    (_rebind_kernels of vllm 0.32 reads every loaded module).
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if _MODULE in sys.modules:
        _wrap_adapter()
    else:
        wrap(KVConnectorFactory, "get_connector_class", patch=NAME, around=_then_wrap_adapter)


def _then_wrap_adapter(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_connector_class(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        if _MODULE in sys.modules:
            _wrap_adapter()
        return found

    return get_connector_class


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


_ADAPTER = f"{_MODULE}.LMCacheMPWorkerAdapter"

PATCH = Patch(
    name=NAME,
    behaviour="E",
    summary=(
        "When its server is lost, LMCache's worker drops all transfers; of a request with a load and a save among them "
        "it reports the load alone, because that would free the request. One that has given up its load (load-timeout) "
        "is not freed by it and would keep its blocks for ever."
    ),
    issue="https://github.com/LMCache/LMCache/issues/5047",
    targets=(
        Target("vllm.distributed.kv_transfer.kv_connector.factory.KVConnectorFactory.get_connector_class"),
        Target(f"{_ADAPTER}._process_finished_stores"),
        Target(f"{_ADAPTER}.get_finished"),
    ),
    runs_in=("worker",),
    connectors=frozenset({"LMCacheMPConnector"}),
    settings=frozenset({SETTING}),
    required=True,
    effects={"sends-reported": "ends of saves that would have been dropped with a load"},
    remove_when="load-timeout is removed",
    apply=apply,
)
