"""kv_transfer_params that no router should send, at the real Scheduler with MooncakeConnector's real scheduler half.

A part of the probe mooncake_transfers.
"""

from __future__ import annotations

from typing import Any

from pdserve.patches import effects
from pdserve.patches.mooncake.requests import PATCH
from tests.upstream.scheduler_lab import Lab

PREFILL, DECODE = "kv_producer", "kv_consumer"
WHOLE = {
    "do_remote_prefill": True,
    "transfer_id": "t",
    "remote_engine_id": "e",
    "remote_bootstrap_addr": "http://127.0.0.1:1",
}


def without(*names: str, **other: Any) -> dict[str, Any]:
    return {name: value for name, value in (WHOLE | other).items() if name not in names}


CASES: dict[str, tuple[str, Any]] = {
    "decode: only do_remote_prefill": (DECODE, {"do_remote_prefill": True}),
    "decode: no transfer_id": (DECODE, without("transfer_id")),
    "decode: no remote_engine_id": (DECODE, without("remote_engine_id")),
    "decode: no remote_bootstrap_addr": (DECODE, without("remote_bootstrap_addr")),
    "decode: empty transfer_id": (DECODE, without(transfer_id="")),
    "decode: transfer_id is a number": (DECODE, without(transfer_id=7)),
    "decode: remote_engine_id is a list": (DECODE, without(remote_engine_id=["e"])),
    "decode: do_remote_decode": (DECODE, {"do_remote_decode": True, "transfer_id": "t"}),
    "decode: both": (DECODE, without(do_remote_decode=True)),
    "decode: text": (DECODE, "do_remote_prefill"),
    "decode: a list": (DECODE, ["do_remote_prefill"]),
    "decode: an empty list": (DECODE, []),
    "decode: an empty text": (DECODE, ""),
    "decode: zero": (DECODE, 0),
    "decode: flag is text": (DECODE, {"do_remote_prefill": "no"}),
    "prefill: do_remote_prefill": (PREFILL, dict(WHOLE)),
    "prefill: no transfer_id": (PREFILL, {"do_remote_decode": True}),
    "prefill: transfer_id is a list": (PREFILL, {"do_remote_decode": True, "transfer_id": ["t"]}),
    "prefill: an empty list": (PREFILL, []),
    "prefill: text": (PREFILL, "do_remote_decode"),
    "good: decode": (DECODE, dict(WHOLE)),
    "good: prefill": (PREFILL, {"do_remote_decode": True, "transfer_id": "t"}),
    "good: nothing": (DECODE, {}),
    "good: no flags": (DECODE, {"transfer_id": "t", "lmcache.max_offload_tokens": 3}),
}


def tried(role: str, params: Any, *, abort: str) -> str:
    """What an engine does with it: "served", "waits", or the error that ends EngineCore.

    abort: never, waiting (before it is scheduled), later.
    """
    lab = Lab(connector={"kv_connector": "MooncakeConnector", "kv_role": role})
    params = dict(params) if isinstance(params, dict) else params
    try:
        lab.add("bad", 64, params, max_tokens=1)
        if abort == "waiting":
            lab.abort("bad")
        for _ in range(5):
            lab.step()
        status = lab.status("bad")
        if abort == "later":
            lab.abort("bad")
            lab.step()
        lab.add("next", 64, max_tokens=1)
        for _ in range(5):
            lab.step()
    except (AssertionError, AttributeError, KeyError, TypeError) as error:
        return type(error).__name__
    assert lab.finish_reasons["next"] == "length"
    if status == "WAITING_FOR_REMOTE_KVS" and abort == "never":
        return "waits"
    held = lab.free_blocks != 63
    return f"holds blocks as {status}" if held else "served"


def verdicts(seen: dict[str, Any]) -> None:
    """Adds to each case what becomes of it now, by when the request is aborted, and how often it was counted."""
    for name, (role, params) in CASES.items():
        for abort in ("never", "waiting", "later"):
            before = effects.totals().get((PATCH.name, "params-rejected"), 0)
            result = tried(role, params, abort=abort)
            counted = effects.totals().get((PATCH.name, "params-rejected"), 0) - before
            seen.setdefault(name, {}).setdefault(abort, []).append([result, counted])
