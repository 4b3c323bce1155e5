"""An engine that does not answer while its cache server comes back, and the other engines beside it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pdserve.reach.protocol import Answered
from pdserve.run.inbox import Restart
from tests.launch.played import Played, plan_with_cache, played

pytestmark = pytest.mark.usefixtures("pdserve_home")

SERVER, FIRST, LAST = "lmcache-0", "aggregated-0", "aggregated-1"
LOOKS = 3
"""At a server, the first of which may have been on its way."""
NO_TOKEN = Answered(id=0, status=500, body="")


def registered(*workers: int) -> Answered:
    """What the server lists."""
    return Answered(id=0, status=200, body=f'{{"registered_gpu_ids": {list(workers)}}}')


async def comes_back_beside(deployment: Played, silent: str, other: str) -> None:
    """The server has died and come back while one engine was silent; the other one serves again."""
    await deployment.serving()
    deployment.is_silent(silent)
    deployment.dies(SERVER)
    await deployment.until(lambda: ("start", SERVER) in deployment.orders)
    await deployment.until(lambda: deployment.phase(other) == "ready")
    deployment.orders.clear()
    deployment.asked.clear()


def test_an_engine_that_is_silent_while_the_server_comes_back_is_proven_before_it_serves(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with played(tmp_path, plan_with_cache(2, restart="on-failure")) as deployment:
            await comes_back_beside(deployment, FIRST, LAST)
            answered = deployment.slow[deployment.canary_of(FIRST)] = asyncio.Event()
            deployment.answers_again(FIRST)
            await deployment.until(lambda: deployment.canary_asked(FIRST))
            assert deployment.phase(FIRST) == "degraded"
            answered.set()
            await deployment.until(lambda: deployment.phases() == {"ready"})
            assert deployment.orders == []

    asyncio.run(scenario())


def test_in_the_end_a_server_needs_no_worker_of_an_engine_that_is_silent(tmp_path: Path) -> None:
    """A process that is stopped does not register: the others would be restarted for it."""

    async def scenario() -> None:
        async with played(tmp_path, plan_with_cache(2, restart="on-failure", attach_seconds=1)) as deployment:
            await deployment.serving()
            deployment.answers["/status"] = registered(1)
            await comes_back_beside(deployment, FIRST, LAST)
            deployment.answers["/status"] = registered(0, 1)
            deployment.answers_again(FIRST)
            await deployment.until(lambda: deployment.phases() == {"ready"})
            assert deployment.orders == []

    asyncio.run(scenario())


def test_an_engine_that_serves_is_left_alone_when_another_one_answers_again(tmp_path: Path) -> None:
    """Its canary would fail now, and what fails one is restarted."""

    async def scenario() -> None:
        async with played(tmp_path, plan_with_cache(2, restart="on-failure")) as deployment:
            await comes_back_beside(deployment, LAST, FIRST)
            deployment.answers[deployment.canary_of(FIRST)] = NO_TOKEN
            deployment.answers_again(LAST)
            await deployment.until(lambda: deployment.phases() == {"ready"})
            await deployment.looks()
            assert deployment.orders == []
            assert not deployment.canary_asked(FIRST)

    asyncio.run(scenario())


def test_an_engine_that_is_silent_during_its_proof_counts_for_itself(tmp_path: Path) -> None:
    """Else it would serve without having registered."""

    async def scenario() -> None:
        async with played(tmp_path, plan_with_cache(1, restart="on-failure")) as deployment:
            await deployment.serving()
            deployment.answers["/status"] = registered()
            deployment.asked.clear()
            deployment.dies(SERVER)
            await deployment.until(lambda: any("/status" in url for url in deployment.asked))
            deployment.asked.clear()
            deployment.is_silent(FIRST)
            await deployment.until(lambda: sum("/status" in url for url in deployment.asked) >= LOOKS)
            await deployment.looks()
            assert not deployment.canary_asked(FIRST)
            deployment.answers["/status"] = registered(0)
            deployment.answers_again(FIRST)
            await deployment.until(lambda: deployment.phases() == {"ready"})
            assert deployment.orders == [("stop", SERVER), ("start", SERVER)]

    asyncio.run(scenario())


def test_an_engine_that_is_silent_in_its_canary_has_the_time_that_silence_has(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with played(tmp_path, plan_with_cache(1, restart="on-failure")) as deployment:
            await deployment.serving()
            answered = deployment.slow[deployment.canary_of(FIRST)] = asyncio.Event()
            deployment.asked.clear()
            deployment.dies(SERVER)
            await deployment.until(lambda: deployment.canary_asked(FIRST))
            deployment.orders.clear()
            deployment.is_silent(FIRST)
            deployment.answers[deployment.canary_of(FIRST)] = NO_TOKEN
            await deployment.looks()
            answered.set()
            await deployment.looks()
            del deployment.answers[deployment.canary_of(FIRST)]
            deployment.answers_again(FIRST)
            await deployment.until(lambda: deployment.phases() == {"ready"})
            assert deployment.orders == []

    asyncio.run(scenario())


def test_a_restart_of_a_silent_engine_returns_when_it_serves(tmp_path: Path) -> None:
    """Its new life is proven with its server, and waits for nothing more."""

    async def scenario() -> None:
        async with played(tmp_path, plan_with_cache(2, restart="on-failure")) as deployment:
            await comes_back_beside(deployment, FIRST, LAST)
            reply = await deployment.ask(Restart(name=FIRST))
            assert reply.exit_code == 0, reply.message
            assert deployment.phases() == {"ready"}

    asyncio.run(scenario())


def test_an_engine_that_stays_silent_beside_a_server_that_is_back_is_replaced_and_serves(tmp_path: Path) -> None:
    async def scenario() -> None:
        planned = plan_with_cache(2, restart="on-failure", unresponsive_seconds=0.2)
        async with played(tmp_path, planned) as deployment:
            await deployment.serving()
            deployment.is_silent(FIRST)
            deployment.dies(SERVER)
            await deployment.until(lambda: ("start", FIRST) in deployment.orders)
            await deployment.until(lambda: deployment.phases() == {"ready"})
            assert deployment.orders == [("stop", SERVER), ("start", SERVER), ("stop", FIRST), ("start", FIRST)]

    asyncio.run(scenario())
