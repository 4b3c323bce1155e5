"""Notifications of KV transfers that are late, doubled or of no request: upstream dies of them, with the guard
none counts.

All on the real Scheduler, with a mock connector and with MooncakeConnector and MultiConnector.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from pdserve.patches import effects
from pdserve.patches.scheduler.stale_completions import PATCH
from tests.upstream.run import IN_RELEASE, VLLM_VERSIONS, on

if IN_RELEASE:
    from tests.upstream.scheduler_lab import Lab, mock, multi

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


def running(lab: Any) -> None:
    """A request whose load has arrived, and which runs."""
    lab.add("a", PROMPT, dict(LOADS), max_tokens=30)
    while lab.status("a") != "RUNNING":
        lab.step(finished_recving=lab.loading() - lab.scheduler.finished_recving_kv_req_ids)


def loading(lab: Any, params: dict[str, Any] = LOADS) -> None:
    lab.add("a", PROMPT, dict(params))
    lab.step()
    assert lab.status("a") == "WAITING_FOR_REMOTE_KVS"


def finished(lab: Any) -> None:
    """A request that has ended and is being sent."""
    lab.add("a", PROMPT, SENDS, max_tokens=2)
    lab.run()
    assert lab.status("a") == "FINISHED_LENGTH_CAPPED"


def load_twice(lab: Any) -> None:
    """The end of a load is reported again, while the request runs."""
    running(lab)
    before = lab.blocks("a")
    lab.step(finished_recving={"a"})
    assert lab.blocks("a")[: len(before)] == before
    lab.run()
    assert len(lab.outputs["a"]) == 30


def send_of_a_running_request(lab: Any) -> None:
    running(lab)
    lab.step(finished_sending={"a"})
    assert lab.status("a") == "RUNNING"


def send_of_a_loading_request(lab: Any) -> None:
    loading(lab)
    lab.step(finished_sending={"a"})
    assert lab.status("a") == "WAITING_FOR_REMOTE_KVS"


def load_and_send_of_an_aborted_request(lab: Any) -> None:
    """LMCache reports an aborted load as both in one step: it is freed once."""
    loading(lab, LOADS_AND_SENDS)
    lab.abort("a")
    lab.step(finished_recving={"a"}, finished_sending={"a"})


def send_before_the_load_of_an_aborted_request(lab: Any) -> None:
    """... or the send first, having nothing to store, while the load still writes."""
    loading(lab, LOADS_AND_SENDS)
    free = lab.free_blocks
    lab.abort("a")
    lab.step(finished_sending={"a"})
    still_held = lab.free_blocks == free
    lab.step(finished_recving={"a"})
    assert still_held


def load_of_a_finished_request(lab: Any) -> None:
    """LMCache without its server reports a load instead of the send that a finished request waits for."""
    finished(lab)
    lab.step(finished_recving={"a"})


def load_twice_of_a_finished_request(lab: Any) -> None:
    """The load is reported again while what the request has made is being sent: upstream frees that, and dies of the
    send's end."""
    loading(lab, LOADS_AND_SENDS)
    lab.step(finished_recving={"a"})
    while lab.busy:
        lab.step()
    free = lab.free_blocks
    lab.step(finished_recving={"a"})
    still_held = lab.free_blocks == free and lab.status("a") == "FINISHED_LENGTH_CAPPED"
    lab.step(finished_sending={"a"})
    assert still_held


def send_of_a_finished_request(lab: Any) -> None:
    """Nothing stale; then once more."""
    finished(lab)
    lab.step(finished_sending={"a"})
    assert lab.status("a") == "GONE"
    lab.step(finished_sending={"a"})


def id_used_again(lab: Any) -> None:
    """Notifications of a request whose id another one has now."""
    lab.add("a", PROMPT, dict(LOADS), max_tokens=1)
    lab.run()
    lab.add("a", PROMPT, max_tokens=20)
    lab.step()
    before = lab.blocks("a")
    lab.step(finished_recving={"a"}, finished_sending={"a"})
    assert lab.blocks("a")[: len(before)] == before


def added_by_the_connector(lab: Any) -> None:
    """MoRIIO (0.27 on) adds sends that are overdue to what its workers report."""
    running(lab)
    lab.book.overdue = {"a", "nobody"}
    lab.step()
    assert lab.status("a") == "RUNNING"


def heard_by_the_connector(lab: Any) -> None:
    """It hears of everything that is dropped."""
    running(lab)
    lab.step(finished_recving={"a", "nobody"}, finished_sending={"nobody"})
    assert lab.book.outputs[-1] == ({"a", "nobody"}, {"nobody"})


UPDATE, FREE = "_update_from_kv_xfer_finished", "_free_blocks"
GONE = ("loads-of-gone-requests", "sends-of-gone-requests")
CASES: tuple[tuple[Callable[[Any], None], dict[str, Any], str | None, set[str]], ...] = (
    (load_twice, {}, UPDATE, {"loads-of-live-requests"}),
    (load_twice, {"async_scheduling": True}, UPDATE, {"loads-of-live-requests"}),
    (load_twice, {"connector": "multi"}, UPDATE, {"loads-of-live-requests"}),
    (load_twice, {"connector": MOONCAKE}, UPDATE, {"loads-of-live-requests"}),
    (load_twice, {"sliding_window": 32, "num_blocks": 41}, UPDATE, {"loads-of-live-requests"}),
    (send_of_a_running_request, {}, FREE, {"sends-of-live-requests"}),
    (send_of_a_loading_request, {}, FREE, {"sends-of-live-requests"}),
    (load_and_send_of_an_aborted_request, {}, UPDATE, {"sends-with-a-load"}),
    (send_before_the_load_of_an_aborted_request, {}, UPDATE, {"sends-before-a-load"}),
    (load_of_a_finished_request, {}, None, set()),
    (load_twice_of_a_finished_request, {}, UPDATE, {"loads-of-sending-requests"}),
    (send_of_a_finished_request, {}, UPDATE, {"sends-of-gone-requests"}),
    (id_used_again, {}, UPDATE, {"loads-of-live-requests", "sends-of-live-requests"}),
    (added_by_the_connector, {}, UPDATE, {"sends-of-gone-requests", "sends-of-live-requests"}),
    (heard_by_the_connector, {}, UPDATE, {"loads-of-live-requests", *GONE}),
)
"""Case, engine, where upstream's scheduler asserts, and what the guard drops, each once."""


def seen(case: Callable[[Any], None], how: dict[str, Any]) -> tuple[str | None, dict[str, float]]:
    """Return where the scheduler has died, and what was dropped. All blocks come back unless it has."""
    if how.get("connector") == "multi":
        how = how | {"connector": multi(mock(), mock("other"))}
    lab = Lab(**{"num_blocks": 21, **how})
    empty, before = lab.free_blocks, effects.totals()
    try:
        case(lab)
        lab.run(400)
    except AssertionError as error:
        *_, innermost = traceback.extract_tb(error.__traceback__)
        assert "/tests/" not in innermost.filename, case.__name__
        return innermost.name, {}
    assert (lab.scheduler.requests, lab.free_blocks) == ({}, empty), case.__name__
    dropped = {effect: n - before.get((patch, effect), 0) for (patch, effect), n in effects.totals().items()}
    return None, {effect: n for effect, n in dropped.items() if n}


@on(*VLLM_VERSIONS)
def test_what_upstream_dies_of_is_dropped_and_counted_and_everything_comes_back() -> None:
    """What upstream takes rightly is left to it."""
    without = {(case.__name__, str(how)): seen(case, how)[0] for case, how, *_ in CASES}
    assert without == {(case.__name__, str(how)): dies for case, how, dies, _ in CASES}
    PATCH.apply()
    PATCH.apply()
    wrong = {
        (case.__name__, str(how)): now
        for case, how, _, dropped in CASES
        if (now := seen(case, how)) != (None, dict.fromkeys(dropped, 1))
    }
    assert wrong == {}
