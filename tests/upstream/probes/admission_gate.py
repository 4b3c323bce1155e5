"""Loads that together want more than the KV pool has, on the real Scheduler. See guards."""

from __future__ import annotations

from typing import Any

from pdserve.patches import effects
from pdserve.patches.scheduler.admission_gate import PATCH
from tests.upstream.scheduler_lab import Lab, mock, multi

BLOCK = 16
MOONCAKE = {"kv_connector": "MooncakeConnector", "kv_role": "kv_consumer"}


def add(lab: Lab, name: str, blocks: int, loaded: int, *, max_tokens: int = 2) -> None:
    """A request of that many blocks, of which `loaded` can be loaded."""
    script = {"matched": loaded * BLOCK}
    lab.add(name, blocks * BLOCK - 1, {"mock": script, "right": script}, max_tokens=max_tokens)


def lab_of(blocks: int, **how: Any) -> Lab:
    """One block of a pool is the null block."""
    return Lab(num_blocks=blocks + 1, **how)


def steps_until_done(lab: Lab, limit: int = 60) -> int | None:
    """None: nothing moves any more, though every load has arrived."""
    try:
        return lab.run(limit)
    except AssertionError:
        return None


def head_that_needs_more(**how: Any) -> dict[str, Any]:
    """The first load lacks 7 blocks; two more loads leave 6, and neither can go on before it."""
    lab = lab_of(12, **how)
    add(lab, "a", 8, 1)
    add(lab, "b", 4, 3)
    add(lab, "c", 4, 3)
    lab.step()
    at_once = [name for name in "abc" if lab.status(name) == "WAITING_FOR_REMOTE_KVS"]
    asked = [name for name in "abc" if any(book.polls[name] for book in lab.books)]
    steps = steps_until_done(lab)
    left = [name for book in lab.books for name in book.locks]
    return {
        "loading_at_once": at_once,
        "asked": asked,
        "done": steps is not None,
        "free": lab.free_blocks,
        "locks": left,
    }


def alone() -> dict[str, Any]:
    """A request that needs the whole pool, with nothing else in the engine."""
    lab = lab_of(12)
    add(lab, "a", 12, 5, max_tokens=1)
    lab.step()
    return {"status": lab.status("a"), "steps": steps_until_done(lab)}


def larger_than_the_pool() -> dict[str, Any]:
    lab = lab_of(12)
    add(lab, "a", 13, 5)
    for _ in range(5):
        lab.step()
    asked, status = lab.book.polls["a"], lab.status("a")
    lab.abort("a")
    return {"status": status, "asked": asked, "free": lab.free_blocks, "steps": steps_until_done(lab)}


def stream_of_small_ones() -> dict[str, Any]:
    """A large request behind loads of which one arrives a step, and a small one more at every step."""
    lab = lab_of(12)
    for index in range(3):
        add(lab, f"before{index}", 3, 2)
    lab.step()
    add(lab, "large", 11, 8)
    arrived = 0
    for step in range(80):
        add(lab, f"small{step}", 3, 2)
        lab.step(finished_recving={load.request_id for load in lab.book.loads[arrived : arrived + 1]})
        arrived += arrived < len(lab.book.loads)
        if lab.status("large") != "WAITING":
            return {"turn_after_steps": step}
    return {"turn_after_steps": None}


def shared_prefix() -> dict[str, Any]:
    """Blocks of a cached prefix that a running request holds need not be free for the next."""
    lab = lab_of(14)
    prompt = [*range(8 * BLOCK + 1)]
    lab.add("first", prompt, max_tokens=20)
    while not lab.outputs.get("first"):
        lab.step()
    add(lab, "loads", 2, 1)
    lab.step()
    lab.add("second", [*prompt, *range(900, 900 + BLOCK)], {"mock": {"matched": 9 * BLOCK}})
    lab.step()
    return {"free": lab.free_blocks, "status": lab.status("second")}


def aborted_while_deferred() -> dict[str, Any]:
    lab = lab_of(12)
    add(lab, "a", 8, 1)
    add(lab, "b", 6, 3)
    lab.step()
    status = lab.status("b")
    lab.abort("b")
    return {"status": status, "done": steps_until_done(lab) is not None, "free": lab.free_blocks}


def mooncake() -> dict[str, Any]:
    """A real connector: two loads of which the second has to wait for the first."""
    lab = lab_of(12, connector=MOONCAKE)
    for name in "ab":
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_bootstrap_addr": "http://127.0.0.1:8998",
            "remote_engine_id": "prefill",
            "transfer_id": f"xfer-{name}",
        }
        lab.add(name, 8 * BLOCK - 1, params, max_tokens=20)
    lab.step()
    first = [lab.status(name) for name in "ab"]
    return {"first": first, "done": steps_until_done(lab) is not None, "free": lab.free_blocks}


def look() -> dict[str, Any]:
    cases = {
        "head that needs more": head_that_needs_more,
        "head that needs more, MultiConnector": lambda: head_that_needs_more(connector=multi(mock(), mock("right"))),
        "head that needs more, async scheduling": lambda: head_that_needs_more(async_scheduling=True),
        "head that needs more, priorities": lambda: head_that_needs_more(scheduler={"policy": "priority"}),
        "alone": alone,
        "larger than the pool": larger_than_the_pool,
        "stream of small ones": stream_of_small_ones,
        "shared prefix": shared_prefix,
        "aborted while deferred": aborted_while_deferred,
        "MooncakeConnector": mooncake,
    }
    found = {}
    for name, case in cases.items():
        before = _deferred()
        found[name] = {**case(), "deferred": _deferred() - before}
    return found


def _deferred() -> int:
    return int(effects.totals().get((PATCH.name, "admissions-deferred"), 0))
