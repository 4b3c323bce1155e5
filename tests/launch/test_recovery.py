"""Recoveries of a serving deployment whose engines do what the test says."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pdserve.errors import StateError
from pdserve.reach.protocol import Answered
from pdserve.run.inbox import Restart
from tests.launch.played import REFUSED, Played, plan, plan_with_cache, serving_deployment

pytestmark = pytest.mark.usefixtures("pdserve_home")

ENGINE = "aggregated-0"
BROKEN = Answered(id=0, status=500, body="broken")


async def to_be_restarted(deployment: Played) -> None:
    """Its cache server has died and is back; the engine fails its canary, and is being started again for that."""
    deployment.answers["/v1/completions"] = BROKEN
    deployment.held.add(("start", ENGINE))
    deployment.dies("lmcache-0")
    await deployment.until(lambda: ("start", ENGINE) in deployment.orders)
    deployment.answers.clear()


async def test_an_engine_that_is_restarted_for_its_cache_server_comes_back(tmp_path: Path) -> None:
    async with serving_deployment(tmp_path, plan_with_cache()) as deployment:
        await to_be_restarted(deployment)
        deployment.obey("start", ENGINE)
        await deployment.until(lambda: deployment.phases() == {"ready"})
        assert deployment.orders_of("lmcache-0") == ["stop", "start"]
        assert deployment.orders_of(ENGINE) == ["stop", "start"]


async def test_one_that_dies_in_that_restart_is_recovered_once(tmp_path: Path) -> None:
    async with serving_deployment(tmp_path, plan_with_cache(restart="on-failure")) as deployment:
        await to_be_restarted(deployment)
        deployment.held.clear()
        deployment.dies(ENGINE)
        await deployment.until(lambda: deployment.phases() == {"ready"})
        orders = deployment.orders_of(ENGINE)
        assert orders.count("start") == 2
        assert orders[-1] == "start"


async def test_a_restart_that_the_loss_of_its_node_interrupts_is_answered(tmp_path: Path) -> None:
    planned = plan(decodes=2, nodes=2).model_copy(update={"on_node_loss": "degrade"})
    async with serving_deployment(tmp_path, planned) as deployment:
        deployment.held.add(("stop", "decode-0"))
        restart = deployment.ask(Restart(name="decode-0"))
        await deployment.until(lambda: ("stop", "decode-0") in deployment.orders)
        deployment.is_lost("host1")
        reply = await restart
        assert reply.exit_code == StateError.exit_code
        assert "the restart of decode-0 was interrupted" in reply.message


@pytest.mark.parametrize(
    ("asked", "answer"),
    [("/status", Answered(id=0, status=200, body="{}")), ("/v1/completions", REFUSED)],
    ids=["attachment", "canary"],
)
async def test_an_engine_that_dies_before_it_is_proven_is_not_waited_for(
    tmp_path: Path, asked: str, answer: Answered
) -> None:
    """The proof itself would take an hour."""
    planned = plan_with_cache(attach_seconds=3600, canary_seconds=3600)
    async with serving_deployment(tmp_path, planned) as deployment:
        deployment.answers[asked] = answer
        restart = deployment.ask(Restart(name=ENGINE))
        await deployment.until(lambda: ("start", ENGINE) in deployment.orders)
        deployment.asked.clear()
        await deployment.until(lambda: any(asked in url for url in deployment.asked))
        deployment.dies(ENGINE)
        assert "did not come back: exited" in (await restart).message


async def test_one_that_dies_before_it_has_returned_to_its_cache_is_not_waited_for(tmp_path: Path) -> None:
    planned = plan_with_cache(restart="on-failure", attach_seconds=3600)
    async with serving_deployment(tmp_path, planned) as deployment:
        deployment.answers["/status"] = Answered(id=0, status=200, body="{}")
        deployment.asked.clear()
        deployment.dies("lmcache-0")
        await deployment.until(lambda: any("/status" in url for url in deployment.asked))
        deployment.dies(ENGINE)
        await deployment.until(lambda: ("start", ENGINE) in deployment.orders)
        deployment.answers.clear()
        await deployment.until(lambda: deployment.phases() == {"ready"})
        assert deployment.orders_of(ENGINE) == ["stop", "start"]


@pytest.mark.parametrize("steps", range(12))
async def test_a_death_that_comes_as_its_recovery_ends_begins_another_one(tmp_path: Path, steps: int) -> None:
    """Whatever of the recovery was done in the steps of the event loop between the two."""
    async with serving_deployment(tmp_path, plan()) as deployment:
        deployment.held.add(("start", "proxy"))
        deployment.dies("proxy")
        await deployment.until(lambda: ("start", "proxy") in deployment.orders)
        deployment.obey("start", "proxy")
        for _ in range(steps):
            await asyncio.sleep(0)
        deployment.dies("proxy")
        await deployment.until(lambda: deployment.orders_of("proxy").count("start") == 2)
        await deployment.until(lambda: deployment.phases() == {"ready"})
