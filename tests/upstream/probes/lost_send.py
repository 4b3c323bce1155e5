"""What LMCache's worker reports of a request whose load and save are both under way when the server is lost."""

from __future__ import annotations

import json
import threading
from typing import Any

from lmcache.integration.vllm.vllm_multi_process_adapter import LMCacheMPWorkerAdapter

from pdserve.patches.lmcache import lost_send


class Under:
    """A transfer that does not end."""

    def query(self) -> bool:
        return False


def worker() -> Any:
    """The adapter without its connection: what it needs to poll its transfers."""
    adapter = object.__new__(LMCacheMPWorkerAdapter)
    adapter.__dict__ |= {
        "dispatcher": None,
        "_health_event": threading.Event(),
        "store_futures": {"both": Under(), "save": Under()},
        "retrieve_futures": {"both": (Under(), [1, 2]), "load": (Under(), [3])},
        "store_events": {},
        "retrieve_events": {},
        "error_block_ids": set(),
        "_failed_request_ids": set(),
        "_pending_store_kv_events": {},
        "_dropped_retrieves": set(),
        "finished_stores": set(),
        "previously_finished": set(),
        "_returned_finished": set(),
    }
    return adapter


def polls() -> list[list[list[str]]]:
    """(sends, loads) of three polls: when `both` and `save` have finished, when the server is lost, and later."""
    adapter = worker()
    adapter._health_event.set()
    first = adapter.get_finished({"both", "save"})
    adapter._health_event.clear()
    answers = [first, adapter.get_finished(set()), adapter.get_finished({"both", "save"})]
    return [[sorted(sends or ()), sorted(loads or ())] for sends, loads in answers]


def main() -> None:
    before = polls()
    lost_send.apply()
    print(json.dumps({"unpatched": before, "patched": polls()}))


if __name__ == "__main__":
    main()
