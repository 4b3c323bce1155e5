"""LMCache's clients inside an engine: when a patch can take hold of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from pdserve.patches.patch import PatchTarget, wrap

ADAPTERS = "lmcache.integration.vllm.vllm_multi_process_adapter"
HOOK = PatchTarget("vllm.distributed.kv_transfer.kv_connector.factory.KVConnectorFactory.get_connector_class")
"""What `once_loaded` takes hold of."""


def once_loaded(patch: str, take_hold: Callable[[], None]) -> None:
    """Calls `take_hold` as soon as vLLM has imported LMCache's clients; at once if it has.

    Not before: lmcache brings numba, and vLLM's CPU worker then fails at the registration of its kernels
    (_rebind_kernels of vllm 0.32 reads every loaded module). `take_hold` may be called again.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if ADAPTERS in sys.modules:
        take_hold()
        return

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_connector_class(*args: Any, **kwargs: Any) -> Any:
            connector = original(*args, **kwargs)
            if ADAPTERS in sys.modules:
                take_hold()
            return connector

        return get_connector_class

    wrap(KVConnectorFactory, "get_connector_class", patch=patch, around=around)
