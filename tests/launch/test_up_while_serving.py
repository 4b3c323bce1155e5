"""What befalls a process that serves while `up` starts others beside it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pdserve.errors import ServeError
from pdserve.plan.model import Plan
from pdserve.run.inbox import Apply, Reply
from tests.launch.played import Played, plan, played

pytestmark = pytest.mark.usefixtures("pdserve_home")


def up(to: Plan) -> Apply:
    return Apply(plan=to, recipe="name: another")


async def starting_one_more(deployment: Played, to: Plan) -> asyncio.Task[Reply]:
    """An `up` that has ordered the start of decode-1, which takes until the test lets it be ready."""
    await deployment.serving()
    deployment.held.add(("start", "decode-1"))
    reply = deployment.ask(up(to))
    await deployment.until(lambda: ("start", "decode-1") in deployment.orders)
    deployment.orders.clear()
    return reply


def test_an_engine_that_dies_meanwhile_is_restarted_as_the_recipe_sets(tmp_path: Path) -> None:
    one, two = (plan(decodes=decodes, restart="on-failure") for decodes in (1, 2))

    async def scenario() -> None:
        async with played(tmp_path, one) as deployment:
            reply = await starting_one_more(deployment, two)
            deployment.dies("prefill-0", member="VLLM::EngineCore")
            await deployment.until(lambda: deployment.phase("prefill-0") == "ready")
            assert deployment.orders == [("stop", "prefill-0"), ("start", "prefill-0")]
            deployment.obey("start", "decode-1")
            assert (await reply).message == "started decode-1; ready"
            assert (deployment.state.phase, deployment.phases()) == ("ready", {"ready"})

    asyncio.run(scenario())


def test_one_that_is_not_restarted_is_started_by_the_next_up(tmp_path: Path) -> None:
    one, two = (plan(prefills=2, decodes=decodes) for decodes in (1, 2))

    async def scenario() -> None:
        async with played(tmp_path, one) as deployment:
            reply = await starting_one_more(deployment, two)
            deployment.dies("prefill-0", member="VLLM::EngineCore")
            await deployment.until(lambda: ("stop", "prefill-0") in deployment.orders)
            deployment.obey("start", "decode-1")
            assert (await reply).message == "started decode-1; degraded: prefill-0 does not serve"
            assert (await deployment.ask(up(two))).message == "started prefill-0; ready"

    asyncio.run(scenario())


def test_the_last_one_of_its_role_does_not_end_what_the_next_one_is_on_its_way_to(tmp_path: Path) -> None:
    one, two = (plan(decodes=decodes) for decodes in (1, 2))

    async def scenario() -> None:
        async with played(tmp_path, one) as deployment:
            reply = await starting_one_more(deployment, two)
            deployment.dies("decode-0")
            await deployment.until(lambda: ("stop", "decode-0") in deployment.orders)
            deployment.obey("start", "decode-1")
            assert (await reply).exit_code == 0
            assert (await deployment.ask(up(two))).message == "started decode-0; ready"

    asyncio.run(scenario())


def test_who_waits_is_told_the_death_that_ends_the_deployment(tmp_path: Path) -> None:
    one, two = (plan(decodes=decodes) for decodes in (1, 2))

    async def scenario() -> None:
        async with played(tmp_path, one) as deployment:
            reply = await starting_one_more(deployment, two)
            deployment.dies("prefill-0")
            told = await reply
            assert told.exit_code == ServeError.exit_code
            assert "prefill-0@localhost" in told.message
            await deployment.over()
            assert isinstance(deployment.error, ServeError)
            assert deployment.error.where == "prefill-0@localhost"

    asyncio.run(scenario())


def test_who_waits_is_told_the_node_that_was_lost(tmp_path: Path) -> None:
    one, two = (plan(decodes=decodes, nodes=2) for decodes in (1, 2))

    async def scenario() -> None:
        async with played(tmp_path, one) as deployment:
            reply = await starting_one_more(deployment, two)
            deployment.is_lost("host1")
            assert "node host1 is lost while serving, and with it decode-0" in (await reply).message
            await deployment.over()
            assert isinstance(deployment.error, ServeError)

    asyncio.run(scenario())


def test_an_engine_that_dies_before_it_is_stopped_for_a_smaller_plan_is_not_missed(tmp_path: Path) -> None:
    more, fewer = plan(prefills=2, decodes=2), plan()

    async def scenario() -> None:
        async with played(tmp_path, more) as deployment:
            await deployment.serving()
            deployment.held.add(("stop", "decode-1"))
            reply = deployment.ask(Apply(plan=fewer, recipe="name: another", replace=True))
            await deployment.until(lambda: ("stop", "decode-1") in deployment.orders)
            deployment.dies("prefill-1")
            deployment.obey("stop", "decode-1")
            assert (await reply).exit_code == 0
            assert set(deployment.state.processes) == {"prefill-0", "decode-0", "proxy"}

    asyncio.run(scenario())


def test_the_proxy_is_told_which_workers_there_are_and_is_not_started_again(tmp_path: Path) -> None:
    one, two = plan(), plan(decodes=2)

    async def scenario() -> None:
        async with played(tmp_path, one) as deployment:
            reply = await starting_one_more(deployment, two)
            told = [message for message in deployment.told if "workers" in message][-1]
            assert [worker["name"] for worker in told["workers"]] == ["prefill-0", "decode-0", "decode-1"]
            assert told["states"] == {"prefill-0": "ready", "decode-0": "ready", "decode-1": "starting"}
            deployment.obey("start", "decode-1")
            assert (await reply).message == "started decode-1; ready"
            assert {"worker": "decode-1", "state": "ready"} in deployment.told
            assert [verb for verb, name in deployment.orders if name == "proxy"] == []

    asyncio.run(scenario())
