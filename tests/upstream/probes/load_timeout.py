"""What becomes of requests whose external load hangs, on the real Scheduler. See waiting_loads."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from pdserve.patches import effects
from pdserve.patches.scheduler.given_up_loads import NAME
from pdserve.patches.scheduler.load_timeout import ATTRIBUTE
from tests.upstream.scheduler_lab import Lab, mock, multi

from vllm.v1.core.sched.scheduler import Scheduler  # isort: skip

SECONDS = 3.0
PROMPT = 96
LOADED = {"mock": {"matched": 80}}


class Bench:
    """A lab whose clock stands still until it is told to go on. Without the patch the clock moves nothing."""

    def __init__(self, **lab: Any) -> None:
        lab.setdefault("connector", mock(load_timeout_seconds=SECONDS))
        self.lab = Lab(**lab)
        self.now = 100.0
        self.timeout = getattr(self.lab.scheduler, ATTRIBUTE, None)
        if self.timeout is not None:
            self.timeout.clock = lambda: self.now
        self.free_at_start = self.lab.free_blocks
        self.before = effects.totals()

    def hang(self, name: str = "a", params: dict[str, Any] = LOADED, **request: Any) -> list[int]:
        """A request whose load is started and does not end. The blocks that it has got for it."""
        self.lab.add(name, request.pop("tokens", PROMPT), params, **request)
        self.lab.step()
        return self.lab.blocks(name)

    def wait(self, seconds: float = SECONDS) -> None:
        """Lets a step see the load, then time pass."""
        self.lab.step()
        self.now += seconds

    def steps(self, limit: int = 40) -> int:
        """Steps until all requests are finished, at most `limit`."""
        for taken in range(limit):
            if not self.lab.busy:
                return taken
            self.lab.step()
        return limit

    def count(self, effect: str) -> float:
        return effects.totals().get((NAME, effect), 0) - self.before.get((NAME, effect), 0)

    @property
    def quarantined(self) -> float:
        return effects.totals().get((NAME, "quarantined-blocks"), 0)


def hanging() -> dict[str, Any]:
    """A load that never ends, and much later does."""
    bench = Bench()
    lab = bench.lab
    old = bench.hang()
    bench.wait(SECONDS - 0.1)
    lab.step()
    early = lab.status("a")
    bench.now += 0.1
    lab.step()
    new = lab.blocks("a") if lab.get("a") else []
    taken = bench.steps()
    facts = {
        "before_the_limit": early,
        "tokens": lab.outputs.get("a", []),
        "steps": taken,
        "shared_blocks": len(set(old) & set(new)),
        "polls": lab.book.polls["a"],
        "status": lab.status("a"),
        "given_up": bench.count("loads-given-up"),
        "quarantined": bench.quarantined,
        "missing_blocks": bench.free_at_start - lab.free_blocks,
        "keeps_polling_its_workers": lab.scheduler.has_requests(),
        "hashed_in_quarantine": [block for block in old if lab.pool.blocks[block].block_hash is not None],
    }
    if bench.timeout is not None:
        lab.step(finished_recving={"a"})
        facts |= {
            "late_ends": bench.count("late-ends"),
            "quarantined_at_the_end": bench.quarantined,
            "missing_at_the_end": bench.free_at_start - lab.free_blocks,
            "told_to_the_connector": any("a" in received for received, _ in lab.book.outputs),
            "idle": not lab.scheduler.has_requests(),
        }
    return facts


def shared_prefix() -> dict[str, Any]:
    """The first two blocks of the load's request are another's, who lives on."""
    bench = Bench()
    lab = bench.lab
    prefix = list(range(32))
    lab.add("owner", prefix + list(range(500, 516)), max_tokens=30)
    lab.step()
    lab.step()
    old = bench.hang(tokens=prefix + list(range(700, 764)))
    owner = lab.blocks("owner")
    bench.wait()
    lab.step()
    new = lab.blocks("a")
    facts = {
        "shared_with_owner": [old[:2] == owner[:2], new[:2] == owner[:2]],
        "else_shared": len(set(old[2:]) & set(new)),
    }
    lab.step(finished_recving={"a"})
    references = [lab.pool.blocks[block].ref_cnt for block in owner[:2]]
    bench.steps()
    return facts | {
        "references_after_the_end": references,
        "tokens": len(lab.outputs["owner"]) + len(lab.outputs["a"]),
        "missing_blocks": bench.free_at_start - lab.free_blocks,
    }


def aborted() -> dict[str, Any]:
    """The client leaves while the request computes, before the transfer has ended."""
    bench = Bench()
    lab = bench.lab
    old = bench.hang()
    bench.wait()
    lab.step()
    lab.abort("a")
    missing = bench.free_at_start - lab.free_blocks
    lab.step(finished_recving={"a"})
    return {"held": missing == len(old), "missing_blocks": bench.free_at_start - lab.free_blocks}


def saving() -> dict[str, Any]:
    """The request finishes, and its blocks are still being saved when the load ends."""
    bench = Bench()
    lab = bench.lab
    old = bench.hang(params={"mock": {"matched": 80, "delay_free": True}})
    bench.wait()
    bench.steps()
    saved = bench.free_at_start - lab.free_blocks - len(old)
    lab.step(finished_recving={"a"})
    after_load = bench.free_at_start - lab.free_blocks
    lab.step(finished_sending={"a"})
    return {
        "blocks_being_saved": saved > 0 and after_load == saved,
        "missing_blocks": bench.free_at_start - lab.free_blocks,
        "status": lab.status("a"),
    }


def aborted_while_loading() -> dict[str, Any]:
    """Nothing was given up; the ends of the load and of the save of an aborted request come in one step."""
    bench = Bench()
    lab = bench.lab
    bench.hang(params={"mock": {"matched": 80, "delay_free": True}})
    lab.abort("a")
    lab.step(finished_recving={"a"}, finished_sending={"a"})
    return {"missing_blocks": bench.free_at_start - lab.free_blocks, "status": lab.status("a")}


def reported_again_with_the_send() -> dict[str, Any]:
    """The load of a request that has ended is reported again, together with the end of its send."""
    bench = Bench()
    lab = bench.lab
    bench.hang(params={"mock": {"matched": 80, "delay_free": True}})
    lab.step(finished_recving={"a"})
    bench.steps()
    held = lab.status("a")
    lab.step(finished_recving={"a"}, finished_sending={"a"})
    return {
        "held": held,
        "missing_blocks": bench.free_at_start - lab.free_blocks,
        "status": lab.status("a"),
    }


def preempted() -> dict[str, Any]:
    """Preempted after it has given up: it must not load the same id again beside the first load."""
    bench = Bench()
    lab = bench.lab
    bench.hang()
    bench.wait()
    lab.step()
    request = lab.get("a")
    lab.scheduler.running.remove(request)
    lab.scheduler._preempt_request(request, time.monotonic())
    lab.scheduler.prev_step_scheduled_req_ids.discard("a")  # else it could not run again in the next step
    taken = bench.steps()
    lab.step(finished_recving={"a"})
    return {
        "finished": taken < 40,
        "tokens": len(lab.outputs["a"]),
        "loads": len(lab.book.loads),
        "missing_blocks": bench.free_at_start - lab.free_blocks,
    }


def failed(policy: str) -> dict[str, Any]:
    """The transfer ends with a failure that names its blocks, in one report and in two."""
    facts: dict[str, Any] = {}
    for name, together in (("one_report", True), ("two_reports", False)):
        bench = Bench(load_failure_policy=policy)
        lab = bench.lab
        lab.add("other", 40, max_tokens=30)
        old = bench.hang(max_tokens=20)
        bench.wait()
        lab.step()
        if together:
            lab.step(invalid_block_ids=set(old), finished_recving={"a"})
        else:
            lab.step(invalid_block_ids=set(old))
            lab.step(finished_recving={"a"})
        bench.steps(80)
        facts[name] = {
            "tokens": [len(lab.outputs[each]) for each in ("a", "other")],
            "missing_blocks": bench.free_at_start - lab.free_blocks,
        }
    return facts


def failed_by_request() -> dict[str, Any]:
    """As vLLM >= 0.30 hears of it with several KV groups: by request. Here with policy fail."""
    bench = Bench(load_failure_policy="fail", sliding_window=32)
    lab = bench.lab
    bench.hang(max_tokens=20)
    bench.wait()
    lab.step()
    lab.step(failed_recving={"a"}, finished_recving={"a"})
    bench.steps()
    return {
        "tokens": len(lab.outputs["a"]),
        "missing_blocks": bench.free_at_start - lab.free_blocks,
    }


def id_used_again() -> dict[str, Any]:
    """A new request under the old id: it does not load while the old load is under way, but it does later."""
    bench = Bench()
    lab = bench.lab
    bench.hang()
    bench.wait()
    lab.step()
    lab.abort("a")
    lab.add("a", PROMPT, LOADED)
    lab.step()
    second = lab.status("a")
    bench.steps()
    lab.step(finished_recving={"a"})
    bench.hang()
    third = lab.status("a")
    bench.wait()
    bench.steps()
    lab.step(finished_recving={"a"})
    return {
        "status": [second, third],
        "loads": len(lab.book.loads),
        "given_up": bench.count("loads-given-up"),
        "late_ends": bench.count("late-ends"),
        "missing_blocks": bench.free_at_start - lab.free_blocks,
    }


def starved() -> dict[str, Any]:
    """No room for fresh blocks until another request, whose KV has arrived, has run and gone."""
    bench = Bench(num_blocks=15)
    lab = bench.lab
    bench.hang("a", tokens=PROMPT)
    bench.hang("b", tokens=PROMPT)
    lab.step(finished_recving={"b"})  # b is ready in the step in which a is given up
    bench.now += SECONDS
    bench.steps()
    first = {name: len(lab.outputs.get(name, [])) for name in ("a", "b")}
    lab.step(finished_recving={"a"})
    bench.steps()
    return {
        "tokens": first,
        "tokens_at_the_end": len(lab.outputs.get("a", [])),
        "missing_blocks": bench.free_at_start - lab.free_blocks,
    }


def no_room() -> dict[str, Any]:
    """Too few blocks beside those in quarantine: no timer frees them, so the request waits for the transfer's end."""
    bench = Bench(num_blocks=10)
    lab = bench.lab
    bench.hang()
    bench.wait()
    bench.now += 1000 * SECONDS
    bench.steps()
    before = (lab.status("a"), len(lab.outputs.get("a", [])))
    lab.step(finished_recving={"a"})
    bench.steps()
    return {
        "before_the_end": before,
        "tokens": len(lab.outputs["a"]),
        "missing_blocks": bench.free_at_start - lab.free_blocks,
    }


def several_connectors() -> dict[str, Any]:
    """Of two children the chosen one hangs; both save asynchronously."""
    children = [mock("mock"), mock("second")]
    bench = Bench(connector=multi(*children, load_timeout_seconds=SECONDS))
    lab = bench.lab
    both = {"mock": {"matched": 80, "delay_free": True}, "second": {"matched": 96, "delay_free": True}}
    bench.hang(params=both)
    bench.wait()
    bench.steps()
    books = [child.book for child in lab.connector._connectors]
    extra = dict(lab.connector._extra_async_saves)
    lab.step(finished_recving={"a"}, finished_sending={"a"})
    return {
        "tokens": len(lab.outputs["a"]),
        "loads": [len(book.loads) for book in books],
        "polls": [book.polls["a"] for book in books],
        "last_allocation": [book.allocations[-1] for book in books],
        "finished": [book.finished for book in books],
        "extra_async_saves": extra,
        "missing_blocks": bench.free_at_start - lab.free_blocks,
    }


def overlapped() -> dict[str, Any]:
    """The AsyncScheduler, a step always under way while the next is scheduled."""
    bench = Bench(async_scheduling=True)
    lab = bench.lab
    bench.hang()
    bench.wait()
    running = lab.schedule()
    for step in range(12):
        following = lab.schedule()
        lab.update(running, finished_recving={"a"} if step == 2 else ())
        running = following
    lab.update(running)
    return {"tokens": len(lab.outputs["a"]), "missing_blocks": bench.free_at_start - lab.free_blocks}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "hanging": hanging,
    "shared_prefix": shared_prefix,
    "aborted": aborted,
    "saving": saving,
    "aborted_while_loading": aborted_while_loading,
    "reported_again_with_the_send": reported_again_with_the_send,
    "preempted": preempted,
    "failed_with_policy_fail": lambda: failed("fail"),
    "failed_with_policy_recompute": lambda: failed("recompute"),
    "id_used_again": id_used_again,
    "starved": starved,
    "no_room": no_room,
    "several_connectors": several_connectors,
    "overlapped": overlapped,
}


def unpatched() -> dict[str, Any]:
    return {"hanging": hanging()}


def patched() -> dict[str, Any]:
    facts = {name: case() for name, case in CASES.items()}
    if hasattr(Scheduler, "_handle_failed_recving"):  # vllm >= 0.30
        facts["failed_by_request"] = failed_by_request()
    return facts
