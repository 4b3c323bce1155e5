"""Connectors of vLLM that move KV between engines and lose or corrupt it. Raw, no recipe may have them; `kind: moriio`
has one with the limits that it needs, where a recipe accepts what is left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Refused:
    """Why one is refused, and what to use instead."""

    kind: str
    """What a recipe would call it."""
    why: str
    todo: str


REFUSED: Mapping[str, Refused] = {
    # kv_connector/v1/nixl/push_*.py. The patch nixl-push closes most of it, for engines that the section's rules let
    # through (rules/connectors.py); what it leaves open has to be accepted there.
    "NixlPushConnector": Refused(
        "nixl-push",
        "in a raw mapping nothing says that its open cases are accepted (docs/limits.md), nor that the sizes of "
        "prefill and decode fit",
        "use kind: nixl-push, or kind: nixl, where decode pulls",
    ),
    # kv_connector/v1/moriio/moriio_connector.py. `update_connector_output` frees sends after `defer_timeout`: a long
    # one, and a proxy that aborts decode before, would close that. Nothing closes the rest: `wait_for_layer_load` gives
    # up its wait after `transfer_timeout` and computes on, `_pop_done_transfers` forgets a read after
    # `recv_abort_timeout`, and neither stops the RDMA, which then writes into blocks that may have been freed.
    "MoRIIOConnector": Refused(
        "moriio",
        "in vllm 0.32 decode computes on before its KV has arrived when a read takes longer than `transfer_timeout` "
        "(30 s), and forgets the read after `recv_abort_timeout` (120 s), which may still write into blocks of other "
        "prompts; prefill frees its blocks after `defer_timeout` (60 s), also while decode has the request queued",
        "use kind: nixl or kind: mooncake; kind: moriio sets those times, and needs accept_unsafe_aborts: true",
    ),
}
"""vLLM's class name -> why not."""


def by_kind(kind: str) -> tuple[str, Refused] | None:
    """Class name and reason of what a recipe calls by a kind."""
    return next(((name, refused) for name, refused in REFUSED.items() if refused.kind == kind.lower()), None)
