"""Connectors of vLLM that move KV between engines and lose or corrupt it, so that no recipe may have them."""

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
    "NixlPushConnector": Refused(
        "nixl-push",
        "if prefill dies, aborts a prompt or drops its KV before decode has asked for it, vLLM 0.32 only logs that: "
        "decode's request waits for ever, and its blocks are lost",
        "use kind: nixl, where decode pulls",
    ),
    # kv_connector/v1/moriio/moriio_connector.py, update_connector_output: "Reap deferred sends whose ACK never
    # arrived". NIXL has the same limit, and heartbeats of decode's scheduler that move it.
    "MoRIIOConnector": Refused(
        "moriio",
        "prefill frees the blocks of a prompt after `defer_timeout` (60 s), in vLLM 0.32 also while decode has the "
        "request in its queue: decode then reads the KV of other prompts, and nothing notices",
        "use kind: nixl or kind: mooncake",
    ),
}
"""vLLM's class name -> why not."""


def by_kind(kind: str) -> tuple[str, Refused] | None:
    """Class name and reason of what a recipe calls by a kind."""
    return next(((name, refused) for name, refused in REFUSED.items() if refused.kind == kind.lower()), None)
