"""Processes that were ready and answer no more: in a start, beside a cache server that returns, and that server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pdserve.errors import StartError
from pdserve.reach.protocol import Answered
from tests.launch.played import Played, plan, plan_with_cache, played, serving_deployment

pytestmark = pytest.mark.usefixtures("pdserve_home")

SOON, NEVER = 0.05, 3600.0
"""Seconds after which a silent process is given up on."""


async def test_it_ends_a_first_start_which_names_it(tmp_path: Path) -> None:
    async with played(tmp_path, plan(unresponsive_seconds=SOON)) as deployment:
        deployment.held.add(("start", "decode-0"))
        await deployment.until(lambda: deployment.phase("prefill-0") == "ready")
        deployment.is_silent("prefill-0")
        await deployment.over()
        assert isinstance(deployment.error, StartError)
        assert deployment.error.where == "prefill-0@localhost"
        assert "prefill does not answer while starting: PID 7 is stopped (SIGSTOP)" in deployment.error.what


async def test_one_that_answers_again_in_time_ends_nothing(tmp_path: Path) -> None:
    async with played(tmp_path, plan(unresponsive_seconds=NEVER)) as deployment:
        deployment.held.add(("start", "decode-0"))
        await deployment.until(lambda: deployment.phase("prefill-0") == "ready")
        deployment.is_silent("prefill-0")
        deployment.obey("start", "decode-0")
        deployment.answers_again("prefill-0")
        await deployment.serving()


SERVER, FIRST, LAST = "lmcache-0", "aggregated-0", "aggregated-1"


def registered(*workers: int) -> Answered:
    """What the server lists."""
    return Answered(id=0, status=200, body=f'{{"registered_gpu_ids": {list(workers)}}}')


async def comes_back_beside(deployment: Played, silent: str, other: str) -> None:
    """The server has died and come back while one engine was silent; the other one serves again."""
    deployment.is_silent(silent)
    deployment.dies(SERVER)
    await deployment.until(lambda: ("start", SERVER) in deployment.orders)
    await deployment.until(lambda: deployment.phase(other) == "ready")
    deployment.orders.clear()
    deployment.asked.clear()


async def test_an_engine_that_is_silent_as_the_server_returns_is_proven_first(tmp_path: Path) -> None:
    async with serving_deployment(tmp_path, plan_with_cache(2, restart="on-failure")) as deployment:
        await comes_back_beside(deployment, FIRST, LAST)
        answered = deployment.slow[deployment.canary_of(FIRST)] = asyncio.Event()
        deployment.answers_again(FIRST)
        await deployment.until(lambda: deployment.canary_asked(FIRST))
        assert deployment.phase(FIRST) == "degraded"
        answered.set()
        await deployment.until(lambda: deployment.phases() == {"ready"})
        assert deployment.orders == []


async def test_in_the_end_a_server_needs_no_worker_of_an_engine_that_is_silent(tmp_path: Path) -> None:
    """A process that is stopped does not register: the others would be restarted for it."""
    async with serving_deployment(tmp_path, plan_with_cache(2, restart="on-failure", attach_seconds=1)) as deployment:
        deployment.answers["/status"] = registered(1)
        await comes_back_beside(deployment, FIRST, LAST)
        deployment.answers["/status"] = registered(0, 1)
        deployment.answers_again(FIRST)
        await deployment.until(lambda: deployment.phases() == {"ready"})
        assert deployment.orders == []


async def test_an_engine_that_stays_silent_beside_a_server_that_is_back_is_replaced_and_serves(tmp_path: Path) -> None:
    planned = plan_with_cache(2, restart="on-failure", unresponsive_seconds=0.2)
    async with serving_deployment(tmp_path, planned) as deployment:
        deployment.is_silent(FIRST)
        deployment.dies(SERVER)
        await deployment.until(lambda: ("start", FIRST) in deployment.orders)
        await deployment.until(lambda: deployment.phases() == {"ready"})
        assert deployment.orders == [("stop", SERVER), ("start", SERVER), ("stop", FIRST), ("start", FIRST)]


async def returns_to(deployment: Played, engine: str) -> asyncio.Event:
    """The server was silent and answers; the canary of an engine is under way. Returns what answers that."""
    answered = deployment.slow[deployment.canary_of(engine)] = asyncio.Event()
    deployment.is_silent(SERVER)
    await deployment.until(lambda: deployment.phase(engine) == "degraded")
    deployment.asked.clear()
    deployment.answers_again(SERVER)
    await deployment.until(lambda: deployment.canary_asked(engine))
    return answered


async def test_one_that_is_silent_twice_gets_all_its_engines_back(tmp_path: Path) -> None:
    async with serving_deployment(tmp_path, plan_with_cache(2, restart="on-failure")) as deployment:
        answered = await returns_to(deployment, LAST)
        await deployment.until(lambda: deployment.phase(FIRST) == "ready")
        deployment.is_silent(SERVER)
        await deployment.until(lambda: deployment.phase(FIRST) == "degraded")
        deployment.answers_again(SERVER)
        await deployment.looks()
        answered.set()
        await deployment.until(lambda: deployment.phases() == {"ready"})
        assert deployment.orders == []


async def test_an_engine_does_not_return_to_one_that_has_died_meanwhile(tmp_path: Path) -> None:
    async with serving_deployment(tmp_path, plan_with_cache(restart="on-failure")) as deployment:
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
