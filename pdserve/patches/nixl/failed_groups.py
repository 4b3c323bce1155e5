"""A NIXL transfer that has failed must not be answered from blocks that nothing was written to.

With one KV group NIXL's worker reports the blocks of a failed transfer as invalid, and the scheduler computes the
request anew or fails it, as `kv_load_failure_policy` says. With several groups (windows, recurrent state) it reports
nothing but the end of the transfer: decode goes on from whatever the blocks held before, and answers 200.

The ids are those of one pool that all groups take their blocks from, so a set of them says which request is meant. Here
the worker reports the blocks of every group, and the scheduler takes whoever holds one of them as a whole, as in
failed_group.py. Since 0.30 upstream reports the request instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdserve.patches import effects
from pdserve.patches.patch import Patch, PatchTarget
from pdserve.patches.scheduler import failed_group
from pdserve.patches.wrap import wrap

NAME = "nixl-failed-groups"
FAILED = "failed-receives"
"""What it counts, beside failed_group's."""


def apply() -> None:
    """Wraps a method of NIXL's worker, and failed_group's of the Scheduler; matters in the workers and EngineCore."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.worker import NixlConnectorWorker
    from vllm.v1.core.sched.scheduler import Scheduler

    owner = next(cls for cls in NixlConnectorWorker.__mro__ if "_handle_failed_transfer" in vars(cls))
    wrap(owner, "_handle_failed_transfer", patch=NAME, around=_naming_the_blocks)
    wrap(
        Scheduler,
        "_update_requests_with_invalid_blocks",
        patch=NAME,
        around=lambda original: failed_group.whole_requests(original, NAME),
    )


def _naming_the_blocks(original: Callable[..., None]) -> Callable[..., None]:
    def handle_failed_transfer(self: Any, req_id: str, handle: int | None) -> None:
        receive = self._recving_metadata.get(req_id)
        if receive is not None and self._is_hma_required:
            # Before upstream queues the request as failed: whoever takes that up finds the blocks too.
            self._invalid_block_ids.put({block for group in receive.local_block_ids for block in group})
            effects.count(NAME, FAILED)
        original(self, req_id, handle)

    return handle_failed_transfer


_NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl."

PATCH = Patch(
    name=NAME,
    behaviour="failed and late loads",
    summary=(
        "A NIXL transfer that fails for a model with several KV groups (hybrid models) is reported as finished, and "
        "nothing else: decode goes on from blocks that were never written, and the client gets 200 and nonsense. Its "
        "blocks are reported, so that the request is computed anew, or fails, as kv_load_failure_policy says."
    ),
    issue="https://github.com/vllm-project/vllm/issues/52234",
    vllm=">=0.26,<0.30",
    targets=(
        PatchTarget(f"{_NIXL}base_worker.NixlBaseConnectorWorker._handle_failed_transfer", body=True, only="<0.30"),
        *failed_group.TARGETS,
    ),
    runs_in=("engine-core", "worker"),
    connectors=frozenset({"NixlConnector"}),
    required=True,
    serves_without=(
        "a failed transfer of a model with several KV groups is answered with 200 and nonsense; models with one group "
        "are not concerned"
    ),
    effects={
        FAILED: "transfers of hybrid models that failed, whose blocks were reported",
        failed_group.RECOMPUTATIONS: "requests of hybrid models that are computed anew, or failed, after such a report",
    },
    remove_when="vllm 0.30 is the oldest supported version: a failed transfer is reported by its request there",
    apply=apply,
)
