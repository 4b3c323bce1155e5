"""A cache server that is silent or dies, again while its engines return to it, or beside an engine that is dead."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pdserve.reach.protocol import Answered
from tests.launch.played import Played, adapted, plan_with_cache, played
from tests.plan import kit

pytestmark = pytest.mark.usefixtures("pdserve_home")

SERVER, FIRST, LAST = "lmcache-0", "aggregated-0", "aggregated-1"


async def returns_to(deployment: Played, engine: str) -> asyncio.Event:
    """The server was silent and answers; the canary of an engine is under way. Returns what answers that."""
    await deployment.serving()
    answered = deployment.slow[deployment.canary_of(engine)] = asyncio.Event()
    deployment.is_silent(SERVER)
    await deployment.until(lambda: deployment.phase(engine) == "degraded")
    deployment.asked.clear()
    deployment.answers_again(SERVER)
    await deployment.until(lambda: deployment.canary_asked(engine))
    return answered


async def turns(count: int) -> None:
    """So many turns of the event loop."""
    loop = asyncio.get_running_loop()
    for _ in range(count):
        turn = loop.create_future()
        loop.call_soon(turn.set_result, None)
        await turn


def test_one_that_is_silent_twice_gets_all_its_engines_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with played(tmp_path, plan_with_cache(2, restart="on-failure")) as deployment:
            answered = await returns_to(deployment, LAST)
            await deployment.until(lambda: deployment.phase(FIRST) == "ready")
            deployment.is_silent(SERVER)
            await deployment.until(lambda: deployment.phase(FIRST) == "degraded")
            deployment.answers_again(SERVER)
            await deployment.looks()
            answered.set()
            await deployment.until(lambda: deployment.phases() == {"ready"})
            assert deployment.orders == []

    asyncio.run(scenario())


@pytest.mark.parametrize("count", range(6))
def test_however_short_its_second_silence_is_no_engine_is_restarted_for_it(tmp_path: Path, count: int) -> None:
    async def scenario() -> None:
        async with played(tmp_path, plan_with_cache(restart="on-failure")) as deployment:
            answered = await returns_to(deployment, FIRST)
            deployment.is_silent(SERVER)
            await turns(count)
            deployment.answers_again(SERVER)
            answered.set()
            await deployment.until(lambda: deployment.phases() == {"ready"})
            assert deployment.orders == []

    asyncio.run(scenario())


def test_an_engine_does_not_return_to_one_that_has_died_meanwhile(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with played(tmp_path, plan_with_cache(restart="on-failure")) as deployment:
            answered = await returns_to(deployment, FIRST)
            deployment.held.add(("start", SERVER))
            deployment.dies(SERVER)
            await deployment.until(lambda: ("start", SERVER) in deployment.orders)
            answered.set()
            await deployment.looks()
            assert deployment.phase(FIRST) == "degraded"
            deployment.obey("start", SERVER)
            await deployment.until(lambda: deployment.phases() == {"ready"})
            assert deployment.orders == [("stop", SERVER), ("start", SERVER)]

    asyncio.run(scenario())


def test_without_a_dead_engine_a_server_expects_the_workers_of_the_others(tmp_path: Path) -> None:
    """Of unequal engines: prefills of two ranks, and a decode of four, which is dead."""
    both = kit.with_lmcache(on=["prefill", "decode"])
    sizes = {"prefill": {"instances": 2}, "decode": {"connector": kit.MULTI}}
    unequal = kit.plan(kit.recipe(kit.on_gpus(2, 4), both, sizes), *kit.hosts(8))

    async def scenario() -> None:
        async with played(tmp_path, adapted(unequal, restart="on-failure", attach_seconds=1)) as deployment:
            await deployment.serving()
            deployment.held.add(("start", "decode-0"))
            deployment.dies("decode-0")
            await deployment.until(lambda: ("start", "decode-0") in deployment.orders)
            deployment.orders.clear()
            deployment.answers["/status"] = Answered(id=0, status=200, body='{"registered_gpu_ids": [0, 1, 2, 3]}')
            deployment.dies(SERVER)
            await deployment.until(lambda: ("start", SERVER) in deployment.orders)
            await deployment.until(lambda: deployment.phase("prefill-0") == deployment.phase("prefill-1") == "ready")
            assert deployment.orders == [("stop", SERVER), ("start", SERVER)]

    asyncio.run(scenario())
