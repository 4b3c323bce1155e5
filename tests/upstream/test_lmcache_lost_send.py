"""A save that ends with the server is reported, whatever happens to a load of the same request."""

from __future__ import annotations

import threading
from typing import Any

from pdserve.patches.lmcache import lost_send
from tests.upstream.run import IN_RELEASE, INSTALLED_VLLM, on

if IN_RELEASE:
    from lmcache.integration.vllm.vllm_multi_process_adapter import LMCacheMPWorkerAdapter


class Transfer:
    """One that does not end."""

    def query(self) -> bool:
        return False


@on(INSTALLED_VLLM)
def test_a_lost_server_ends_saves_and_loads_each_reported_once() -> None:
    loads = ["both", "load"]
    assert polls() == [[[], []], [["save"], loads], [[], []]], "the save of `both` is never reported"
    lost_send.apply()
    assert polls() == [[[], []], [["both", "save"], loads], [[], []]]


def polls() -> list[list[list[str]]]:
    """(sends, loads) of three polls: when `both` and `save` have finished, when the server is lost, and later. Of the
    adapter without its connection: what it needs to poll its transfers."""
    adapter: Any = object.__new__(LMCacheMPWorkerAdapter)
    adapter.__dict__ |= {
        "dispatcher": None,
        "_health_event": threading.Event(),
        "store_futures": {"both": Transfer(), "save": Transfer()},
        "retrieve_futures": {"both": (Transfer(), [1, 2]), "load": (Transfer(), [3])},
        **{name: {} for name in ("store_events", "retrieve_events", "_pending_store_kv_events")},
        **{name: set() for name in ("error_block_ids", "_failed_request_ids", "_dropped_retrieves", "finished_stores")},
        **{name: set() for name in ("previously_finished", "_returned_finished")},
    }
    adapter._health_event.set()
    first = adapter.get_finished({"both", "save"})
    adapter._health_event.clear()
    answers = [first, adapter.get_finished(set()), adapter.get_finished({"both", "save"})]
    return [[sorted(sends or ()), sorted(loads or ())] for sends, loads in answers]
