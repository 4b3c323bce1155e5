"""In which order requests run when memory is short, on the real Scheduler. See waiting_loads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdserve.patches import effects
from pdserve.patches.scheduler.ready_waiters_first import NAME
from tests.upstream.scheduler_lab import Lab

LOADED = {"mock": {"matched": 80}}
BLOCKS = 12


def _end(lab: Lab, limit: int = 40) -> dict[str, Any]:
    """Steps in which every load ends as soon as it can, and what has come out then."""
    order: list[str] = []
    for _ in range(limit):
        if not lab.busy:
            break
        ended = lab.loading() - lab.scheduler.finished_recving_kv_req_ids
        order += [name for name in lab.step(finished_recving=ended).num_scheduled_tokens if name not in order]
    return {"order": order, "stuck": sorted(lab.scheduler.requests), "free": lab.free_blocks == BLOCKS - 1}


def behind_a_deferred_request() -> dict[str, Any]:
    """The head was told "not yet" at first, and needs the blocks of the one behind it, whose KV has arrived."""
    lab = Lab(num_blocks=BLOCKS)
    lab.add("head", 128, {"mock": {"matched": 0, "defers": 1}})
    lab.add("loaded", 96, LOADED)
    return _end(lab)


def behind_a_higher_priority() -> dict[str, Any]:
    """Priority scheduling: a request that comes later stands before the one whose KV has arrived."""
    lab = Lab(num_blocks=BLOCKS, scheduler={"policy": "priority"})
    _prioritized(lab, "loaded", 96, 5, LOADED)
    lab.step()
    _prioritized(lab, "urgent", 128, 0)
    return _end(lab)


def behind_a_failed_request() -> dict[str, Any]:
    """Both loads have ended, the first with a failure; alone it does not fit beside the second."""
    lab = Lab(num_blocks=BLOCKS)
    lab.add("failed", 128, {"mock": {"matched": 64}})
    lab.add("loaded", 96, LOADED)
    lab.step()
    lab.connector.book.failed.add("failed")
    lab.step(finished_recving=lab.loading(), invalid_block_ids=lab.blocks("failed"))
    return _end(lab)


def fair_otherwise() -> dict[str, Any]:
    """Enough memory: those whose KV has arrived run in their order, then the others in theirs."""
    lab = Lab(num_blocks=BLOCKS * 8)
    for name, params in (("a", None), ("b", LOADED), ("c", None), ("d", LOADED)):
        deferred = {"mock": {"matched": 0, "defers": 2}} if params is None else params
        lab.add(name, 96, deferred)
    lab.step()
    lab.step(finished_recving={"d", "b"})
    order: list[str] = []
    for _ in range(40):
        order += [name for name in lab.step().num_scheduled_tokens if name not in order]
    return {"order": order, "stuck": sorted(lab.scheduler.requests)}


def aborted() -> dict[str, Any]:
    """One leaves the queue from each of its parts."""
    lab = Lab(num_blocks=BLOCKS * 8)
    lab.add("head", 96, {"mock": {"matched": 0, "defers": 99}})
    for name in ("a", "b"):
        lab.add(name, 96, LOADED)
    lab.step()
    lab.step(finished_recving={"a"})
    counted = lab.scheduler.get_request_counts()
    lab.abort("a", "head")
    lab.step(finished_recving={"b"})
    lab.abort("b")
    return {
        "counted": list(counted),
        "stuck": sorted(lab.scheduler.requests),
        "free": lab.free_blocks == BLOCKS * 8 - 1,
    }


def _prioritized(lab: Lab, name: str, tokens: int, priority: int, params: dict[str, Any] | None = None) -> None:
    request = lab.request(name, tokens, params)
    request.priority = priority
    lab.scheduler.add_request(request)


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "behind_a_deferred_request": behind_a_deferred_request,
    "behind_a_higher_priority": behind_a_higher_priority,
    "behind_a_failed_request": behind_a_failed_request,
    "fair_otherwise": fair_otherwise,
    "aborted": aborted,
}


def unpatched() -> dict[str, Any]:
    return {name: case() for name, case in CASES.items()}


def patched() -> dict[str, Any]:
    before = effects.totals().get((NAME, "overtakings"), 0)
    facts = unpatched()
    return facts | {"overtakings": effects.totals().get((NAME, "overtakings"), 0) - before}
