"""MoRIIOConnector that reads only what a request names: patch moriio-unread-prompts has what goes wrong without it.

vLLM loads the class through kv_connector_module_path. It keeps upstream's name, by which MultiConnector names its
children.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.moriio import moriio_connector as upstream
from vllm.distributed.kv_transfer.kv_connector.v1.moriio.moriio_common import MoRIIOMode

from pdserve.patches import effects
from pdserve.patches.moriio import COMPUTED, NAME
from pdserve.patches.record import left_out

_COUNTED = "pdserve_unread_prompt"
"""Attribute of a request."""


class MoRIIOConnector(upstream.MoRIIOConnector):  # type: ignore[misc]  # vllm is not there when types are checked
    """Is upstream's connector, which in READ mode counts a prompt as external only when the request says where its KV
    is."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        effects.count(NAME, "instances")

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return upstream's answer for what will be read; else no tokens, so that vLLM computes them."""
        scheduler = self.connector_scheduler
        if self.mode == MoRIIOMode.READ and not scheduler.is_producer and not _names_kv(request):
            # The scheduler asks again in each step until there are blocks for it.
            if not getattr(request, _COUNTED, False):
                setattr(request, _COUNTED, True)
                effects.count(NAME, COMPUTED)
            return 0, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)  # type: ignore[no-any-return]


def _names_kv(request: Any) -> bool:
    """Tell whether a request names KV that upstream's update_state_after_alloc will have read. It unsets
    do_remote_prefill then: a request that comes again after a preemption names no KV."""
    params = request.kv_transfer_params or {}
    return bool(params.get("do_remote_prefill") and params.get("remote_block_ids") and "remote_engine_id" in params)


if left_out(NAME):
    MoRIIOConnector = upstream.MoRIIOConnector  # type: ignore[misc]  # this upstream is unknown: the patch is skipped
