"""A load of which one KV group fails, on the real Scheduler of a hybrid model. See waiting_loads."""

from __future__ import annotations

from typing import Any

from pdserve.patches import effects
from pdserve.patches.scheduler.failed_group import NAME
from tests.upstream.scheduler_lab import Lab

from vllm.v1.core.sched.scheduler import Scheduler  # isort: skip

PROMPT, LOADED, WINDOW = 128, 112, 32


def failed_load(group: int | None, policy: str) -> dict[str, Any]:
    """`group`: whose blocks the worker reports; None: it reports the request (vLLM >= 0.30)."""
    lab = Lab(sliding_window=WINDOW, load_failure_policy=policy)
    free = lab.free_blocks
    lab.add("other", 40, max_tokens=12)
    lab.add("a", PROMPT, {"mock": {"matched": LOADED}})
    lab.step()
    assert lab.status("a") == "WAITING_FOR_REMOTE_KVS"
    null = lab.pool.null_block.block_id
    # A worker lists what it was told to fill: in a sliding window's group the null block too.
    report = {"failed_recving": {"a"}} if group is None else {"invalid_block_ids": {*lab.blocks("a", group)[-2:], null}}
    lab.connector.book.failed.add("a")
    try:
        lab.step(finished_recving={"a"}, **report)
    except (ValueError, RuntimeError) as error:
        return {"dies_of": type(error).__name__, "says": str(error)}
    scheduled: dict[str, int] = {}
    for _ in range(40):
        for name, tokens in lab.step().num_scheduled_tokens.items():
            scheduled[name] = scheduled.get(name, 0) + tokens
    return {
        "computed_anew": scheduled.get("a", 0) >= PROMPT,
        "tokens": [len(lab.outputs.get(name, [])) for name in ("a", "other")],
        "reason": lab.finish_reasons.get("a"),
        "all_blocks_free": lab.free_blocks == free,
    }


def unpatched() -> dict[str, Any]:
    return {
        f"{kind}/{policy}": failed_load(group, policy)
        for kind, group in (("full", 0), ("sliding", 1), ("by_request", None))
        for policy in ("recompute", "fail")
        if group is not None or hasattr(Scheduler, "_handle_failed_recving")
    }


def patched() -> dict[str, Any]:
    before = effects.totals().get((NAME, "whole-recomputations"), 0)
    facts = unpatched()
    return facts | {"counted": effects.totals().get((NAME, "whole-recomputations"), 0) - before}
