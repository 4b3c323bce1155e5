"""A new engine is routed to once KV has crossed between it and its peers; a peer that fails with all is found."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pdserve.launch.start_proofs import AGAIN_SECONDS, Outcome, PeerJudge, PeerVerdict
from pdserve.reach.protocol import Answered
from pdserve.run.inbox import Restart
from tests.launch.played import LIMIT, Played, plan, serving_deployment
from tests.tables import each_row

YES: Outcome = "crossed"
NO: Outcome = "failed"
BUSY: Outcome = "unknown"

pytestmark = pytest.mark.usefixtures("pdserve_home")


WELL, SUSPECT = PeerVerdict(proven=True), PeerVerdict(proven=False)


@each_row("what, canaries, started, seconds, verdict", [
    ("nobody to try it with", [{}], {}, 10, WELL),
    ("all well", [{"a": YES, "b": YES}], {}, 10, WELL),
    ("nobody had time", [{"a": BUSY, "b": BUSY}], {}, 10, WELL),
    ("one peer fails, another does not", [{"a": YES, "b": NO}], {}, 10, PeerVerdict(True, bad=("b",))),
    ("all but one", [{"a": NO, "b": NO, "c": NO, "d": YES}], {}, 10, PeerVerdict(True, bad=("a", "b", "c"))),
    ("all fail: the new engine is the suspect", [{"a": NO, "b": NO}], {}, 10, SUSPECT),
    ("one fails, the others had no time", [{"a": NO, "b": BUSY}], {}, 10, SUSPECT),
    ("its next life is well", [{"a": NO}, {"a": YES}], {}, 10, WELL),
    ("the only peer fails with its next life too", 2 * [{"a": NO}], {}, 10, PeerVerdict(False, ("a",), True)),
    ("all fail with it too: one by one", 2 * [{"a": NO, "b": NO}], {}, 10, PeerVerdict(False, ("a",), True)),
    ("after the first is restarted the second is seen", [*2 * [{"a": NO, "b": NO}], {"a": YES, "b": NO}], {2: "a"}, 10,
     PeerVerdict(True, bad=("b",))),
    ("KV crossed in between", [{"a": NO}, {"a": YES}, {"a": NO}], {}, 10, SUSPECT),
    ("it was started anew in between", 2 * [{"a": NO}], {1: "a"}, 10, SUSPECT),
    ("a pair fails after a restart of one", 2 * [{"a": YES, "b": NO}], {1: "b"}, 10, PeerVerdict(True, spared=("b",))),
    ("much later", 2 * [{"a": YES, "b": NO}], {1: "b"}, AGAIN_SECONDS, PeerVerdict(True, bad=("b",))),
    ("the only peer after its restart too", 4 * [{"a": NO}], {2: "a"}, 10, PeerVerdict(False, spared=("a",))),
])  # fmt: skip
def test_verdict(
    what: str, canaries: list[dict[str, Outcome]], started: dict[int, str], seconds: float, verdict: PeerVerdict
) -> None:
    """On the last of the new engines, so many seconds apart; peers were `started` anew before canaries of a number."""
    judge, judged = PeerJudge(), None
    for number, outcomes in enumerate(canaries):
        if (peer := started.get(number)) is not None:
            judge.started(peer)
        judged = judge.judge(outcomes, number * seconds)
    assert judged == verdict


BROKEN = Answered(id=0, status=500, body="the transfer failed")
IN_FLIGHT = Answered(id=0, status=200, body='{"workers": [{"name": "prefill-0", "in_flight": 3}]}')
LATE = Answered(id=0, status=504, body="no token")


def pair(prefill: int, decode: int) -> str:
    """What the URL of the canary of a pair has in it."""
    return f"/canary?prefill=prefill-{prefill}&decode=decode-{decode}&"


def events(deployment: Played, kind: str) -> list[dict[str, Any]]:
    return [event for event in deployment.events if event["event"] == kind]


def counted(received: int, computed: int) -> Answered:
    """The /metrics of an engine."""
    counts = {"external_kv_transfer": received, "local_compute": computed, "local_cache_hit": 0}
    lines = (f'vllm:prompt_tokens_by_source_total{{source="{name}"}} {count}' for name, count in counts.items())
    return Answered(id=0, status=200, body="\n".join(lines) + "\n")


async def restarted(deployment: Played, name: str) -> int:
    return (await asyncio.wait_for(deployment.ask(Restart(name=name)), LIMIT)).exit_code


async def test_a_new_engine_is_tried_with_each_peer_that_serves(tmp_path: Path) -> None:
    async with serving_deployment(tmp_path, plan(3, 2)) as deployment:
        deployment.dies("prefill-2")
        await deployment.until(lambda: deployment.phase("prefill-2") == "dead")
        assert await restarted(deployment, "decode-1") == 0
        tried = {peer for peer in range(3) if any(pair(peer, 1) in url for url in deployment.asked)}
        assert tried == {0, 1}
        assert not any("/canary" in url and pair(0, 0) in url for url in deployment.asked)


@pytest.mark.parametrize("new", ["decode-0", "prefill-0"])
async def test_a_peer_that_fails_where_another_does_not_is_restarted_and_named(tmp_path: Path, new: str) -> None:
    bad = "prefill-1" if new == "decode-0" else "decode-1"
    async with serving_deployment(tmp_path, plan(2, 2)) as deployment:
        deployment.answers[pair(1, 0) if new == "decode-0" else pair(0, 1)] = BROKEN
        deployment.held.add(("start", bad))
        assert await restarted(deployment, new) == 0
        (named,) = events(deployment, "bad_peer")
        assert (named["name"], named["new"], named["restarted"]) == (bad, new, True)
        # It was out of routing before the new engine was routed to.
        routes = [(event["name"], event["routing"]) for event in events(deployment, "route")]
        assert routes.index((bad, "draining")) < len(routes) - 1 - routes[::-1].index((new, "ready"))
        await deployment.until(lambda: ("start", bad) in deployment.orders)
        deployment.answers.clear()
        deployment.obey("start", bad)
        await deployment.until(lambda: deployment.phases() == {"ready"})
        assert (deployment.orders_of(new).count("start"), deployment.orders_of(bad).count("start")) == (1, 1)


async def test_an_engine_that_fails_with_all_is_started_again_itself(tmp_path: Path) -> None:
    async with serving_deployment(tmp_path, plan(2, 2, restart="on-failure")) as deployment:
        deployment.answers["&decode=decode-0&"] = BROKEN
        deployment.dies("decode-0")
        await deployment.until(lambda: deployment.orders_of("decode-0").count("start") == 2)
        deployment.answers.clear()
        await deployment.until(lambda: deployment.phases() == {"ready"})
        assert deployment.orders_of("prefill-0").count("start") == deployment.orders_of("prefill-1").count("start") == 0


async def test_the_only_peer_is_restarted_when_the_second_life_fails_too(tmp_path: Path) -> None:
    async with serving_deployment(tmp_path, plan(restart="on-failure")) as deployment:
        deployment.answers["/canary"] = BROKEN
        deployment.held.add(("start", "prefill-0"))
        deployment.dies("decode-0")
        await deployment.until(lambda: ("start", "prefill-0") in deployment.orders)
        assert deployment.orders_of("decode-0").count("start") == 2
        assert [event["name"] for event in events(deployment, "bad_peer")] == ["prefill-0"]
        deployment.answers.clear()
        deployment.obey("start", "prefill-0")
        await deployment.until(lambda: deployment.phases() == {"ready"})
        assert deployment.orders_of("decode-0").count("start") == 2


async def test_a_busy_peer_is_no_reason(tmp_path: Path) -> None:
    async with serving_deployment(tmp_path, plan()) as deployment:
        deployment.answers |= {"/canary": LATE, "/workers": IN_FLIGHT}
        assert await restarted(deployment, "decode-0") == 0
        assert not events(deployment, "bad_peer")


@pytest.mark.parametrize(
    ("after", "proven"),
    [(counted(300, 1), True), (counted(0, 300), False), (counted(300, 300), True), (counted(0, 0), True)],
    ids=["received", "computed by decode", "busy with prompts of its own", "not counted"],
)
async def test_the_counters_of_decode_are_the_proof(tmp_path: Path, after: Answered, proven: bool) -> None:
    async with serving_deployment(tmp_path, plan(1, 2)) as deployment:
        deployment.answers["/metrics"] = counted(0, 0)
        restart = asyncio.create_task(restarted(deployment, "decode-0"))
        await deployment.until(lambda: any("/canary" in url for url in deployment.asked))
        deployment.answers["/metrics"] = after
        await deployment.until(lambda: any("peer" in event for event in events(deployment, "canary")))
        first = next(event for event in events(deployment, "canary") if "peer" in event)
        assert first["ok"] is proven
        await restart
