"""NixlConnector below MultiConnector, for a request that another child loads: what its worker is told to read."""

from __future__ import annotations

from tests.upstream.nixl_lab import NIXL  # isort: skip

import json
from typing import Any

from tests.upstream.nixl_decode_lab import PULL
from tests.upstream.scheduler_lab import Lab, mock, multi

PROMPT = 128


def told(*, matched: int) -> dict[str, Any]:
    """`matched`: tokens that the other child has, which comes first."""
    lab = Lab(max_num_batched_tokens=2 * PROMPT, connector=multi(mock(), NIXL | {"kv_role": "kv_consumer"}))
    pull = PULL | {"remote_block_ids": (list(range(1, 1 + PROMPT // lab.block_size)),), "remote_request_id": "a"}
    lab.add("a", PROMPT, pull | {"mock": {"matched": matched}})
    (_, nixl) = lab.schedule().kv_connector_metadata.metadata
    read = nixl.reqs_to_recv["a"]
    return {"loads_of_the_other": len(lab.book.loads), "blocks": sum(len(group) for group in read.local_block_ids)}


if __name__ == "__main__":
    print(json.dumps({"chosen": told(matched=0), "not_chosen": told(matched=PROMPT)}))
