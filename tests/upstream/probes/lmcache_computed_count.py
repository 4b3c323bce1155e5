"""What LMCache stores of requests of which vLLM has computed less than LMCache believes.

By hand, more workloads: `python -m tests.upstream.probes.lmcache_computed_count 600`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pdserve.patches import effects
from pdserve.patches.lmcache import computed_count
from tests.upstream.probes.lmcache_engine import OURS, Engine, upstream_module
from tests.upstream.probes.lmcache_ledger import LedgerAdapter
from tests.upstream.probes.lmcache_reload import PROMPT, workloads

BATCH = 125
"""Tokens of a step: no multiple of a block, so that steps end inside one."""
STORED, LOCAL = 256, 80
"""Tokens of the prompt that LMCache has, and vLLM itself: the load begins in the chunk where the local prefix ends."""


def engine(module: str, **scheduler: Any) -> Engine:
    LedgerAdapter.slow = 0
    made = Engine(module, {}, num_blocks=400, batch=BATCH, scheduler=scheduler)
    made.ledger.store(PROMPT, 0, STORED)
    return made


def failed_behind_a_local_prefix(module: str) -> dict[str, Any]:
    """vLLM goes on where the first block of the load is, without asking again."""
    made = engine(module)
    made.add("warm", [*PROMPT[:LOCAL], 1, 2, 3])
    assert made.run()
    made.fails = {"a"}.__contains__
    made.add("a", PROMPT[:600])
    return outcome(made)


def failed_with_a_running_neighbour(module: str) -> dict[str, Any]:
    """The failed load names a block that a running prefill shares with it: vLLM sets that one back."""
    made = engine(module, long_prefill_token_threshold=50)
    made.add("neighbour", [*PROMPT[:LOCAL], *range(7000, 7520)])
    while made.lab.get("neighbour").num_computed_tokens < 2 * LOCAL:
        made.step()
    made.fails = {"a"}.__contains__
    made.add("a", PROMPT[:600])
    return outcome(made)


def hit_that_is_not_used(module: str) -> dict[str, Any]:
    """The request wants its whole prompt computed (as for logprobs of it), and vLLM drops LMCache's answer."""
    made = engine(module)
    made.lab.add("a", PROMPT[:600], max_tokens=2, skip_reading_prefix_cache=True)
    return outcome(made)


def outcome(made: Engine) -> dict[str, Any]:
    """What is stored when all have ended, or the first wrong chunk."""
    try:
        done = made.run()
    except AssertionError as error:
        return {"wrong": str(error)}
    return {"done": done, "stored": made.stored, "locked": made.ledger.locked}


def look(module: str, count: int) -> dict[str, Any]:
    return {
        "behind a local prefix": failed_behind_a_local_prefix(module),
        "running neighbour": failed_with_a_running_neighbour(module),
        "unused hit": hit_that_is_not_used(module),
        "random": workloads(count, OURS, bounded=False, failing=0.3, batches=(64, 125, 256)),
    }


def main() -> None:
    module, count = upstream_module(), int(sys.argv[1])
    results: dict[str, Any] = {"unpatched": look(module, count)}
    computed_count.apply()
    computed_count.apply()
    before = effects.totals().get((computed_count.NAME, "counts-lowered"), 0)
    results["patched"] = look(module, count)
    results["lowered"] = effects.totals().get((computed_count.NAME, "counts-lowered"), 0) - before
    print(json.dumps(results))


if __name__ == "__main__":
    main()
