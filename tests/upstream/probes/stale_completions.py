"""Notifications about KV transfers that came late, twice, or for no request, on the real Scheduler. See guards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdserve.patches import effects
from pdserve.patches.scheduler.stale_completions import PATCH
from tests.upstream.scheduler_lab import Lab, Scheduler, mock, multi

PROMPT = 64
LOADS: dict[str, Any] = {
    "mock": {"matched": 48},
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_bootstrap_addr": "http://127.0.0.1:8998",
    "remote_engine_id": "prefill",
    "transfer_id": "xfer",
}
"""For the mock and for MooncakeConnector."""
MOONCAKE = {"kv_connector": "MooncakeConnector", "kv_role": "kv_consumer"}
LOADS_AND_SENDS = {"mock": {"matched": 48, "delay_free": True}}
SENDS = {"mock": {"delay_free": True}}

Notify = Callable[[Lab], dict[str, Any]]


def running(lab: Lab, max_tokens: int = 30) -> None:
    """A request whose load has arrived, and which runs."""
    lab.add("a", PROMPT, dict(LOADS), max_tokens=max_tokens)
    _until(lab, "WAITING_FOR_REMOTE_KVS")
    lab.step(finished_recving={"a"})
    _until(lab, "RUNNING")


def loading(lab: Lab, params: dict[str, Any] = LOADS) -> None:
    lab.add("a", PROMPT, dict(params))
    lab.step()
    assert lab.status("a") == "WAITING_FOR_REMOTE_KVS"


def _until(lab: Lab, status: str) -> None:
    for _ in range(400):
        if lab.status("a") == status:
            return
        lab.step()
    raise RuntimeError(f"it is {lab.status('a')}, not {status}")


def end(lab: Lab) -> dict[str, Any]:
    """Runs what is left to its end: did all blocks come back?"""
    lab.run(400)
    return {"free_at_the_end": lab.free_blocks, "left": sorted(lab.scheduler.requests)}


def load_twice(lab: Lab) -> dict[str, Any]:
    """The end of a load is reported again, while the request runs."""
    running(lab)
    before = lab.blocks("a")
    lab.step(finished_recving={"a"})
    kept = lab.blocks("a")[: len(before)] == before
    return {**end(lab), "kept_its_blocks": kept, "tokens": len(lab.outputs["a"])}


def load_twice_before_its_turn(lab: Lab) -> dict[str, Any]:
    """... while the request has not been scheduled again: with overlapping steps. Upstream takes that."""
    loading(lab)
    first, second = lab.schedule(), lab.schedule()
    lab.update(first, finished_recving={"a"})
    lab.update(second, finished_recving={"a"})
    return {**end(lab), "tokens": len(lab.outputs["a"])}


def load_of_no_request(lab: Lab) -> dict[str, Any]:
    lab.step(finished_recving={"nobody"})
    return end(lab)


def send_of_no_request(lab: Lab) -> dict[str, Any]:
    lab.step(finished_sending={"nobody"})
    return end(lab)


def send_of_a_running_request(lab: Lab) -> dict[str, Any]:
    running(lab)
    lab.step(finished_sending={"a"})
    return {"status": lab.status("a"), **end(lab), "tokens": len(lab.outputs["a"])}


def send_of_a_loading_request(lab: Lab) -> dict[str, Any]:
    loading(lab)
    lab.step(finished_sending={"a"})
    return {"status": lab.status("a"), **end(lab), "tokens": len(lab.outputs["a"])}


def load_and_send_of_an_aborted_request(lab: Lab) -> dict[str, Any]:
    """LMCache reports an aborted load as both in one step."""
    loading(lab, LOADS_AND_SENDS)
    lab.abort("a")
    lab.step(finished_recving={"a"}, finished_sending={"a"})
    return end(lab)


def send_before_the_load_of_an_aborted_request(lab: Lab) -> dict[str, Any]:
    """... or the send first, having nothing to store, while the load still writes."""
    loading(lab, LOADS_AND_SENDS)
    free = lab.free_blocks
    lab.abort("a")
    lab.step(finished_sending={"a"})
    freed_under_the_load = lab.free_blocks != free
    lab.step(finished_recving={"a"})
    return {"freed_under_the_load": freed_under_the_load, **end(lab)}


def load_of_an_aborted_request(lab: Lab) -> dict[str, Any]:
    """Nothing stale: upstream frees the blocks of an aborted load when it has ended."""
    loading(lab)
    lab.abort("a")
    lab.step()
    held = lab.status("a")
    lab.step(finished_recving={"a"})
    return {"held": held, **end(lab)}


def load_of_a_finished_request(lab: Lab) -> dict[str, Any]:
    """LMCache without its server reports a load instead of the send that a finished request waits for."""
    lab.add("a", PROMPT, SENDS, max_tokens=2)
    lab.run()
    held = lab.status("a")
    lab.step(finished_recving={"a"})
    return {"held": held, **end(lab)}


def load_twice_of_a_finished_request(lab: Lab) -> dict[str, Any]:
    """The load is reported again while what the request has made is being sent."""
    loading(lab, LOADS_AND_SENDS)
    lab.step(finished_recving={"a"})
    while lab.busy:
        lab.step()
    free = lab.free_blocks
    lab.step(finished_recving={"a"})
    freed_under_the_send = lab.free_blocks != free
    held = lab.status("a")
    lab.step(finished_sending={"a"})
    return {"freed_under_the_send": freed_under_the_send, "held": held, **end(lab)}


def second_load_of_an_aborted_request(lab: Lab) -> dict[str, Any]:
    """Nothing stale: its first load has failed, and it is aborted in the second one."""
    loading(lab, {"mock": {"matched": 48, "offers_again": True, "delay_free": True}})
    lab.step(finished_recving={"a"}, invalid_block_ids=lab.blocks("a"))
    lab.step()
    assert (lab.status("a"), len(lab.book.loads)) == ("WAITING_FOR_REMOTE_KVS", 2)
    lab.abort("a")
    lab.step(finished_recving={"a"})
    return {"then": lab.status("a"), **end(lab)}


def send_of_a_finished_request(lab: Lab) -> dict[str, Any]:
    """Nothing stale; then once more."""
    lab.add("a", PROMPT, SENDS, max_tokens=2)
    lab.run()
    held = lab.status("a")
    lab.step(finished_sending={"a"})
    gone = lab.status("a")
    lab.step(finished_sending={"a"})
    return {"held": held, "then": gone, **end(lab)}


def id_used_again(lab: Lab) -> dict[str, Any]:
    """Notifications of a request whose id another one has now."""
    lab.add("a", PROMPT, dict(LOADS), max_tokens=1)
    lab.run()
    lab.add("a", PROMPT, max_tokens=20)
    lab.step()
    before = lab.blocks("a")
    lab.step(finished_recving={"a"}, finished_sending={"a"})
    kept = lab.blocks("a")[: len(before)] == before
    return {**end(lab), "kept_its_blocks": kept, "tokens": len(lab.outputs["a"])}


def preempted(lab: Lab) -> dict[str, Any]:
    """A request that was preempted, after its load, hears of the load again."""
    lab.add("first", 12 * 16, max_tokens=100)
    running(lab, max_tokens=100)
    output = lab.schedule()
    while lab.status("a") == "RUNNING":
        lab.update(output)
        output = lab.schedule()
    status = lab.status("a")
    lab.update(output, finished_recving={"a"})
    return {"status": status, **end(lab), "tokens": len(lab.outputs["a"])}


def arrived_without_room(lab: Lab) -> dict[str, Any]:
    """A request whose KV is there, but not the blocks for the rest; since 0.31 it waits in kv_holding_waiting."""
    lab.add("first", 10 * 16 - 1, max_tokens=150)
    lab.step()
    lab.add("a", 8 * 16, {"mock": {"matched": 4 * 16}})
    while lab.free_blocks:
        lab.step()
    lab.step(finished_recving={"a"})
    lab.step()
    assert lab.status("first") == "RUNNING"
    status = f"{lab.status('a')} with {len(lab.blocks('a'))} blocks"
    lab.step(finished_recving={"a"})
    return {"status": status, **end(lab), "tokens": len(lab.outputs["a"])}


def added_by_the_connector(lab: Lab) -> dict[str, Any]:
    """MoRIIO (0.27 on) adds sends that are overdue to what its workers report."""
    running(lab)
    lab.book.overdue = {"a", "nobody"}
    lab.step()
    return {"status": lab.status("a"), **end(lab)}


def connector_hears_everything(lab: Lab) -> dict[str, Any]:
    running(lab)
    lab.step(finished_recving={"a", "nobody"}, finished_sending={"nobody"})
    received, sent = lab.book.outputs[-1]
    return {"received": sorted(received), "sent": sorted(sent), **end(lab)}


CASES: dict[str, tuple[Notify, dict[str, Any]]] = {
    "load twice": (load_twice, {}),
    "load twice, async scheduling": (load_twice, {"async_scheduling": True}),
    "load twice, MultiConnector": (load_twice, {"connector": multi(mock(), mock("other"))}),
    "load twice, MooncakeConnector": (load_twice, {"connector": MOONCAKE}),
    "load twice, two KV groups": (load_twice, {"sliding_window": 32, "num_blocks": 41}),
    "load twice before its turn": (load_twice_before_its_turn, {"async_scheduling": True}),
    "load of no request": (load_of_no_request, {}),
    "send of no request": (send_of_no_request, {}),
    "send of a running request": (send_of_a_running_request, {}),
    "send of a loading request": (send_of_a_loading_request, {}),
    "load and send of an aborted request": (load_and_send_of_an_aborted_request, {}),
    "send before the load of an aborted request": (send_before_the_load_of_an_aborted_request, {}),
    "load of an aborted request": (load_of_an_aborted_request, {}),
    "load of a finished request": (load_of_a_finished_request, {}),
    "load twice of a finished request": (load_twice_of_a_finished_request, {}),
    "second load of an aborted request": (second_load_of_an_aborted_request, {}),
    "send of a finished request": (send_of_a_finished_request, {}),
    "id used again": (id_used_again, {}),
    "preempted": (preempted, {}),
    "arrived without room": (arrived_without_room, {}),
    "added by the connector": (added_by_the_connector, {}),
    "connector hears everything": (connector_hears_everything, {}),
}


def look() -> dict[str, Any]:
    """Each case: what was seen, or how the engine died; and what was dropped."""
    results: dict[str, Any] = {}
    for name, (case, how) in CASES.items():
        lab = Lab(**{"num_blocks": 21, **how})
        before = effects.totals()
        try:
            seen = case(lab)
        except AssertionError as error:
            seen = {"died": _where(error)}
        dropped = {effect: int(n - before.get((patch, effect), 0)) for (patch, effect), n in effects.totals().items()}
        results[name] = {**seen, "dropped": {effect: n for effect, n in dropped.items() if n}}
    return results


def seen_by_wrappers() -> dict[str, Any]:
    """What others that wrap the same method hear, applied before and after: call it after `watch` and the patch."""
    lab = Lab()
    running(lab)
    _heard.clear()
    lab.step(finished_recving={"a"}, finished_sending={"nobody"})
    return dict(_heard)


_heard: dict[str, list[list[str]]] = {}


def watch(name: str) -> None:
    """Wraps the method that the patch wraps."""
    original = Scheduler._update_from_kv_xfer_finished

    def wrapper(self: Any, output: Any) -> None:
        _heard[name] = [sorted(output.finished_recving or ()), sorted(output.finished_sending or ())]
        original(self, output)

    Scheduler._update_from_kv_xfer_finished = wrapper


def patch() -> None:
    """Twice, between two others that wrap the same method."""
    watch("inside")
    PATCH.apply()
    PATCH.apply()
    watch("outside")


def _where(error: AssertionError) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    assert trace is not None
    return trace.tb_frame.f_code.co_name
