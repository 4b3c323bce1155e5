"""NIXL receives that fail, with one KV group and with two: what upstream does, and what the patch makes of it."""

from __future__ import annotations

import json
from typing import Any

from pdserve.patches import effects
from pdserve.patches.nixl import failed_groups
from pdserve.patches.scheduler import failed_group
from pdserve.patches.verdict import judge
from tests.upstream.nixl_decode_lab import BROKEN, FAILURES, PROMPT, UNREACHABLE, WINDOW, Decode
from tests.upstream.probes.multiconnector_metrics import versions_here

STEPS = 40
"""More than its requests take."""


def receive(what: str | None, policy: str, window: int | None, workers: int = 1) -> dict[str, Any]:
    """One request whose receive fails in the first worker, beside one that needs none."""
    decode = Decode(policy, window=window, workers=workers)
    decode.lab.add("other", 40, max_tokens=12)
    decode.fail(what or BROKEN)
    decode.pull("a")
    for step in range(STEPS):
        if step == 2:
            decode.end_the_other_transfers()
        decode.step()
    return {
        "computed_anew": decode.scheduled.get("a", 0) >= PROMPT,
        "tokens": [len(decode.lab.outputs.get(name, [])) for name in ("a", "other")],
        "reason": decode.lab.finish_reasons.get("a"),
        "all_blocks_free": decode.lab.free_blocks == decode.empty,
    }


def look() -> dict[str, Any]:
    results: dict[str, Any] = {}
    for policy in ("recompute", "fail"):
        for what in FAILURES:
            results[f"{what}/{policy}"] = receive(what, policy, WINDOW)
            results[f"one group/{what}/{policy}"] = receive(what, policy, None)
        results[f"one of two workers/{policy}"] = receive(UNREACHABLE, policy, WINDOW, workers=2)
    return results


def counted() -> list[float]:
    totals, name = effects.totals(), failed_groups.NAME
    names = (failed_groups.FAILED, failed_group.RECOMPUTATIONS)
    return [totals.get((name, effect), 0) for effect in names]


def main() -> None:
    patch = failed_groups.PATCH
    verdict = judge(patch, versions_here()).outcome
    results: dict[str, Any] = {"verdict": verdict, "unpatched": look()}
    if verdict == "apply":
        patch.apply()
        patch.apply()
        results["patched"] = look()
        results["counted"] = counted()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
