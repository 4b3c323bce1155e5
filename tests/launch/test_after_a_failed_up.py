"""What an `up` that failed on a running deployment leaves: engines that serve, and recoveries that go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.errors import StartError
from pdserve.launch.fleet import ANSWER_SECONDS, Fleet, PendingStops
from pdserve.plan.time_limits import restart_seconds
from pdserve.reach.protocol import Died
from tests.launch.played import REFUSED, Played, plan, serving_deployment

pytestmark = pytest.mark.usefixtures("pdserve_home")


def dies_loading(deployment: Played, name: str) -> None:
    deployment.says(Died(name=name, pid=8, code=1, how="exited", seconds=1, while_starting=True))


async def test_of_two_that_start_side_by_side_the_one_that_lives_serves(tmp_path: Path) -> None:
    one, three = plan(decodes=1), plan(decodes=3)
    async with serving_deployment(tmp_path, one) as deployment:
        deployment.held |= {("start", "decode-1"), ("start", "decode-2")}
        reply = deployment.up(three)
        await deployment.until(lambda: ("start", "decode-2") in deployment.orders)
        dies_loading(deployment, "decode-2")
        await deployment.until(lambda: ("stop", "decode-2") in deployment.orders)
        deployment.obey_all()
        assert (await reply).exit_code == StartError.exit_code
        assert (deployment.state.phase, deployment.phase("decode-1")) == ("degraded", "ready")
        assert (await deployment.up(three)).message == "started decode-2; ready"
        assert (deployment.state.phase, deployment.phases()) == ("ready", {"ready"})


async def an_up_that_fails(deployment: Played) -> None:
    """To one decode more, which dies as it loads."""
    deployment.held.add(("start", "decode-1"))
    reply = deployment.up(plan(decodes=2, restart="on-failure"))
    await deployment.until(lambda: ("start", "decode-1") in deployment.orders)
    dies_loading(deployment, "decode-1")
    assert (await reply).exit_code == StartError.exit_code
    assert not deployment.is_over


async def test_an_engine_whose_proof_it_has_interrupted_is_proven_and_returns(tmp_path: Path) -> None:
    async with serving_deployment(tmp_path, plan(restart="on-failure")) as deployment:
        deployment.answers["/v1/completions"] = REFUSED
        deployment.dies("prefill-0")
        await deployment.until(lambda: deployment.state.processes["prefill-0"].note == "to be proven")
        await an_up_that_fails(deployment)
        assert deployment.phase("prefill-0") == "degraded"
        deployment.answers.clear()
        await deployment.until(lambda: deployment.phase("prefill-0") == "ready")
        assert deployment.orders.count(("start", "prefill-0")) == 1


async def test_one_that_still_loaded_is_proven_when_it_is_ready(tmp_path: Path) -> None:
    async with serving_deployment(tmp_path, plan(restart="on-failure")) as deployment:
        deployment.held.add(("start", "prefill-0"))
        deployment.dies("prefill-0")
        await deployment.until(lambda: ("start", "prefill-0") in deployment.orders)
        await an_up_that_fails(deployment)
        deployment.obey("start", "prefill-0")
        await deployment.until(lambda: deployment.phase("prefill-0") == "ready")
        assert any(event["event"] == "canary" and event["name"] == "prefill-0" for event in deployment.events)


async def test_a_process_that_moves_is_on_its_new_node(tmp_path: Path) -> None:
    """Else the loss of the old one would take it along, and that of the new one would not."""
    one, two = plan(decodes=1), plan(decodes=1, nodes=2)
    async with serving_deployment(tmp_path, one) as deployment:
        fleet: Fleet = deployment.fleet
        fleet.adopt(two)
        nodes = {process.name: process.node for process in two.processes}
        assert {name: state.node for name, state in deployment.state.processes.items()} == nodes
        fleet.adopt(one)


def test_a_stop_that_an_agent_has_failed_at_is_ordered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("pdserve.launch.fleet.time.monotonic", lambda: now)
    uncleared = PendingStops()
    uncleared.started("decode-0", "a")
    assert uncleared.order_stop("decode-0", "a", 30, "stopped")
    now = 110.0
    assert not uncleared.order_stop("decode-0", "a", 30, "stopped")
    now = 131.0 + ANSWER_SECONDS
    assert uncleared.order_stop("decode-0", "a", 30, "stopped")
    assert uncleared.stopped("decode-0") == "stopped"
    assert "decode-0" not in uncleared


def test_the_restart_of_an_engine_may_wait_for_the_others_of_its_server() -> None:
    from tests.plan import kit

    shared = kit.plan(kit.recipe(kit.with_lmcache(), {"prefill": {"instances": 3}}))
    alone = kit.plan(kit.recipe(kit.with_lmcache()))
    more = restart_seconds(shared, "prefill-0") - restart_seconds(alone, "prefill-0")
    assert more >= 2 * shared.timeouts.engine_seconds
