"""A process is started only when its last life was stopped, whoever had begun to stop it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.launch.fleet import PendingStops
from pdserve.run.inbox import Restart
from tests.launch.played import plan, serving_deployment

pytestmark = pytest.mark.usefixtures("pdserve_home")


async def test_up_starts_a_dead_engine_when_what_was_left_of_it_is_gone(tmp_path: Path) -> None:
    async with serving_deployment(tmp_path, plan(decodes=2)) as deployment:
        deployment.held.add(("stop", "decode-1"))
        deployment.dies("decode-1")
        await deployment.until(lambda: ("stop", "decode-1") in deployment.orders)
        reply = deployment.up(deployment.plan)
        await deployment.until(lambda: deployment.state.change == "under way")
        await deployment.looks()
        deployment.obey("stop", "decode-1")
        assert (await reply).message == "started decode-1; ready"
        assert deployment.orders == [("stop", "decode-1"), ("start", "decode-1")]
        assert deployment.state.phase == "ready"


async def test_up_finds_an_engine_that_a_restart_was_stopping_back(tmp_path: Path) -> None:
    async with serving_deployment(tmp_path, plan(decodes=2)) as deployment:
        deployment.held.add(("stop", "decode-1"))
        restart = deployment.ask(Restart(name="decode-1"))
        await deployment.until(lambda: ("stop", "decode-1") in deployment.orders)
        reply = deployment.up(deployment.plan)
        await deployment.looks()
        deployment.obey("stop", "decode-1")
        assert (await restart).exit_code == 0
        assert (await reply).message == "already up"
        assert deployment.orders == [("stop", "decode-1"), ("start", "decode-1")]
        assert deployment.phases() == {"ready"}


def test_a_stop_is_ordered_again_only_if_it_is_to_be_over_sooner() -> None:
    left = PendingStops()
    assert left.order_stop("decode-0", "here", 60, "stopped")
    assert not left.order_stop("decode-0", "here", 60, "stopped")
    assert left.order_stop("decode-0", "here", 0, "stopped")


def test_what_was_ordered_to_stop_twice_is_left_until_both_orders_are_answered() -> None:
    left = PendingStops()
    left.started("decode-0", "here")
    left.order_stop("decode-0", "here", 60, "dead")
    left.order_stop("decode-0", "here", 0, "stopped")
    assert left.stopped("decode-0") == "dead"
    assert "decode-0" in left
    assert left.stopped("decode-0") == "dead"
    assert "decode-0" not in left


def test_on_a_node_that_is_lost_nothing_is_waited_for() -> None:
    left = PendingStops()
    for name, node in (("decode-0", "lost"), ("decode-1", "here")):
        left.started(name, node)
        left.order_stop(name, node, 60, "stopped")
    left.lost("lost")
    assert ("decode-0" in left, left.is_stopping("decode-0")) == (False, False)
    assert ("decode-1" in left, left.is_stopping("decode-1")) == (True, True)


async def test_an_engine_whose_last_life_does_not_end_is_not_started_and_the_cause_is_said(tmp_path: Path) -> None:
    """Its agent stands still, for longer than any stop takes."""
    async with serving_deployment(tmp_path, plan(decodes=2)) as deployment:
        deployment.fleet.start("decode-1")
        assert deployment.orders == []
        assert deployment.state.processes["decode-1"].note == "was not started: its last life was not stopped"
        await deployment.until(lambda: ("stop", "decode-1") in deployment.orders)


async def test_an_engine_that_no_kill_ends_is_started_again_when_it_is_gone(tmp_path: Path) -> None:
    """It waits for its device, which a second life would find taken."""
    async with serving_deployment(tmp_path, plan(decodes=2)) as deployment:
        deployment.unending.add("decode-1")
        deployment.dies("decode-1")
        await deployment.until(lambda: ("stop", "decode-1") in deployment.orders)
        assert "was not started: its last life was not stopped" in (await deployment.up(deployment.plan)).message
        assert ("start", "decode-1") not in deployment.orders
        deployment.unending.clear()
        assert (await deployment.up(deployment.plan)).exit_code == 0
        assert deployment.phases() == {"ready"}
