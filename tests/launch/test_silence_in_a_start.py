"""A process that was ready and answers no more, while others are started: no start waits for it without a limit."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pdserve.errors import StartError
from pdserve.run.inbox import Apply
from tests.launch.played import plan, played

pytestmark = pytest.mark.usefixtures("pdserve_home")

SOON, NEVER = 0.05, 3600.0
"""Seconds after which a silent process is given up on."""


def test_it_ends_a_first_start_which_names_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with played(tmp_path, plan(unresponsive_seconds=SOON)) as deployment:
            deployment.held.add(("start", "decode-0"))
            await deployment.until(lambda: deployment.phase("prefill-0") == "ready")
            deployment.is_silent("prefill-0")
            await deployment.over()
            assert isinstance(deployment.error, StartError)
            assert deployment.error.where == "prefill-0@localhost"
            assert "prefill does not answer while starting: PID 7 is stopped (SIGSTOP)" in deployment.error.what

    asyncio.run(scenario())


def test_one_that_answers_again_in_time_ends_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with played(tmp_path, plan(unresponsive_seconds=NEVER)) as deployment:
            deployment.held.add(("start", "decode-0"))
            await deployment.until(lambda: deployment.phase("prefill-0") == "ready")
            deployment.is_silent("prefill-0")
            deployment.obey("start", "decode-0")
            deployment.answers_again("prefill-0")
            await deployment.serving()

    asyncio.run(scenario())


def test_it_is_recovered_beside_an_up_on_a_deployment_that_serves(tmp_path: Path) -> None:
    one, two = (plan(decodes=decodes, restart="on-failure", unresponsive_seconds=SOON) for decodes in (1, 2))

    async def scenario() -> None:
        async with played(tmp_path, one) as deployment:
            await deployment.serving()
            deployment.held.add(("start", "decode-1"))
            reply = deployment.ask(Apply(plan=two, recipe="name: test"))
            await deployment.until(lambda: ("start", "decode-1") in deployment.orders)
            deployment.is_silent("prefill-0")
            await deployment.until(lambda: ("start", "prefill-0") in deployment.orders)
            await deployment.until(lambda: deployment.phase("prefill-0") == "ready")
            deployment.obey("start", "decode-1")
            assert (await reply).message == "started decode-1; ready"

    asyncio.run(scenario())


def test_it_is_watched_also_after_an_up_that_something_else_has_ended(tmp_path: Path) -> None:
    one, two = (plan(decodes=decodes, restart="on-failure", unresponsive_seconds=SOON) for decodes in (1, 2))

    async def scenario() -> None:
        async with played(tmp_path, one) as deployment:
            await deployment.serving()
            deployment.held.add(("start", "decode-1"))
            reply = deployment.ask(Apply(plan=two, recipe="name: test"))
            await deployment.until(lambda: ("start", "decode-1") in deployment.orders)
            deployment.is_silent("prefill-0")
            deployment.dies("decode-1")
            assert (await reply).exit_code == StartError.exit_code
            await deployment.until(lambda: ("start", "prefill-0") in deployment.orders)

    asyncio.run(scenario())
