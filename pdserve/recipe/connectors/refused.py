"""Connectors of vLLM that move KV between engines and lose or corrupt it. Raw, no recipe may have them; `kind: moriio`
has one with the limits that it needs, where a recipe accepts what is left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Refused:
    """Why one is refused, and what to use instead."""

    why: str
    todo: str


NIXL_PUSH = "NixlPushConnector"
REFUSED: Mapping[str, Refused] = {
    # kv_connector/v1/nixl/push_*.py, vllm#46283 and vllm#48633.
    NIXL_PUSH: Refused(
        "NIXL push is not supported: it ran on no device here, and in vllm 0.32 decode waits for ever for KV that does "
        "not come, loses the blocks of aborted requests, and gets KV of other prompts from writes after a lease",
        "use kind: nixl, where decode pulls",
    ),
    # kv_connector/v1/moriio/moriio_connector.py. `update_connector_output` frees sends after `defer_timeout`: a long
    # one, and a proxy that aborts decode before, would close that. Nothing closes the rest: `wait_for_layer_load` gives
    # up its wait after `transfer_timeout` and computes on, `_pop_done_transfers` forgets a read after
    # `recv_abort_timeout`, and neither stops the RDMA, which then writes into blocks that may have been freed.
    "MoRIIOConnector": Refused(
        "in vllm 0.32 decode computes on before its KV has arrived when a read takes longer than `transfer_timeout` "
        "(30 s), and forgets the read after `recv_abort_timeout` (120 s), which may still write into blocks of other "
        "prompts; prefill frees its blocks after `defer_timeout` (60 s), also while decode has the request queued",
        "use kind: nixl or kind: mooncake; kind: moriio sets those times, and needs accept_unsafe_aborts: true",
    ),
}
"""vLLM's class name -> why not."""
