"""Patch offloading-foreign-blocks: a store is waited for before a load of another child writes to its blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdserve.patches import effects
from pdserve.patches.patch import Patch, PatchTarget, wrap

NAME = "offloading-foreign-blocks"
NOTED = "blocks-noted"
"""What it counts."""
_SCHEDULER = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler.OffloadingConnectorScheduler"


def apply() -> None:
    """Wraps OffloadingConnectorScheduler.update_state_after_alloc; matters in EngineCore."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler

    wrap(OffloadingConnectorScheduler, "update_state_after_alloc", patch=NAME, around=_noting)


def _noting(original: Callable[..., None]) -> Callable[..., None]:
    def update_state_after_alloc(self: Any, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens == 0:
            # A load fills those without a hash: who shares a prefix has no store to wait for. 0 is the null block.
            given = {block.block_id for group in blocks.blocks for block in group if block.block_hash is None} - {0}
            self._current_batch_allocated_block_ids |= given
            effects.count(NAME, NOTED, len(given))
        original(self, request, blocks, num_external_tokens)

    return update_state_after_alloc


PATCH = Patch(
    name=NAME,
    behaviour="stores to host memory",
    summary=(
        "OffloadingConnector waits for a store before its blocks are given to another request, but it does not note "
        "the blocks into which another child of MultiConnector loads: the store then reads that child's KV, and keeps "
        "it under the key of who had the blocks before. Here those blocks are noted, as vllm 0.33 does."
    ),
    issue="https://github.com/vllm-project/vllm/issues/46951",
    vllm="<0.33",
    targets=(
        PatchTarget(f"{_SCHEDULER}.update_state_after_alloc", body=True),
        PatchTarget(f"{_SCHEDULER}.build_connector_meta"),
    ),
    runs_in=("engine-core",),
    connectors=frozenset({"MultiConnector", "OffloadingConnector"}),
    required=True,
    instead="take offloading out of the connector of this role",
    effects={NOTED: "new blocks, of requests that offloading loads nothing for, of which it was told"},
    remove_when="vllm 0.33 is the oldest that is supported",
    apply=apply,
)
