"""Loads that fail as a whole: before one that has arrived (hybrid models, 0.30 on), and offered again. See guards."""

from __future__ import annotations

from typing import Any

from pdserve.patches import effects
from pdserve.patches.scheduler.failed_loads_stand_back import PATCH
from tests.upstream.scheduler_lab import Lab


def look(policy: str = "fcfs") -> dict[str, Any]:
    """Both loads fit beside each other; computing the first takes more, its sliding window having to slide."""
    lab = Lab(num_blocks=29, max_num_batched_tokens=512, sliding_window=48, scheduler={"policy": policy})
    before = _counted("stood-back")
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
        "stood_back": _counted("stood-back") - before,
    }


def look_again() -> dict[str, Any]:
    """A peer that offers the same KV again after a failed load, of more than half of all blocks."""
    lab = Lab(num_blocks=21, max_num_batched_tokens=512)
    before, free = _counted("reservations-dropped"), lab.free_blocks
    lab.add("a", 12 * 16, {"mock": {"matched": 12 * 16, "offers_again": True}})
    lab.step()
    lab.book.failed.add("a")
    lab.step(finished_recving={"a"}, invalid_block_ids=lab.blocks("a"))
    for _ in range(40):
        lab.step(finished_recving=lab.loading() - lab.scheduler.finished_recving_kv_req_ids)
    return {
        "loads": len(lab.book.loads),
        "tokens": len(lab.outputs.get("a", ())),
        "free": lab.free_blocks == free,
        "reservations_dropped": _counted("reservations-dropped") - before,
    }


def _counted(effect: str) -> int:
    return int(effects.totals().get((PATCH.name, effect), 0))
