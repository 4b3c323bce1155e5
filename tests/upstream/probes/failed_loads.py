"""A load that fails as a whole, before one that has arrived: hybrid models, vLLM 0.30 on. See guards."""

from __future__ import annotations

from typing import Any

from pdserve.patches import effects
from pdserve.patches.failed_loads_stand_back import PATCH
from tests.upstream.scheduler_lab import Lab


def look(policy: str = "fcfs") -> dict[str, Any]:
    """Both loads fit beside each other; computing the first takes more, its sliding window having to slide."""
    lab = Lab(num_blocks=29, max_num_batched_tokens=512, sliding_window=48, scheduler={"policy": policy})
    before = _stood_back()
    free = lab.free_blocks
    lab.add("fails", 169, {"mock": {"matched": 169}})
    lab.add("arrives", 144, {"mock": {"matched": 144}})
    lab.step()
    loading = sorted(lab.loading())
    lab.book.failed.add("fails")
    lab.step(finished_recving={"fails", "arrives"}, failed_recving={"fails"})
    for _ in range(40):
        lab.step()
    return {
        "loading": loading,
        "tokens": {name: len(lab.outputs.get(name, ())) for name in loading},
        "free": lab.free_blocks == free,
        "stood_back": _stood_back() - before,
    }


def _stood_back() -> int:
    return int(effects.totals().get((PATCH.name, "stood-back"), 0))
