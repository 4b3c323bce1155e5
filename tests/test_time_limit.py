"""A limit ends what takes longer, and nothing else, also in a task that cleans up after its own cancellation."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from pdserve.time_limit import time_limit

SHORT, LONG = 0.01, 60.0


async def for_ever(begun: asyncio.Event | None = None) -> None:
    if begun is not None:
        begun.set()
    await asyncio.Event().wait()


async def test_what_takes_longer_is_a_timeout() -> None:
    with pytest.raises(TimeoutError):
        async with time_limit(SHORT):
            await for_ever()
    assert not current().cancelling()


@pytest.mark.parametrize("seconds", [0, -1])
async def test_without_time_nothing_is_waited_for(seconds: float) -> None:
    with pytest.raises(TimeoutError):
        async with time_limit(seconds):
            await for_ever()


@pytest.mark.parametrize("seconds", [LONG, None])
async def test_what_ends_in_time_goes_on(seconds: float | None) -> None:
    done = asyncio.get_running_loop().create_future()
    async with time_limit(seconds):
        asyncio.get_running_loop().call_soon(done.set_result, None)
        await done
    assert not current().cancelling()


async def test_a_cancelled_task_that_cleans_up_has_its_limits_too() -> None:
    begun, done = asyncio.Event(), list[str]()

    async def stopped() -> None:
        try:
            await for_ever(begun)
        finally:
            with contextlib.suppress(TimeoutError):
                async with time_limit(SHORT):
                    await for_ever()
            done.append("killed")

    task = asyncio.create_task(stopped())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == ["killed"]


async def test_a_cancellation_as_the_time_ends_comes_first() -> None:
    async def limited() -> None:
        async with time_limit(0):
            try:
                await for_ever()
            finally:
                current().cancel()  # somebody else's, at the same moment

    task = asyncio.create_task(limited())
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_of_two_limits_the_one_that_is_over_ends_its_own_block() -> None:
    async with time_limit(LONG):
        with pytest.raises(TimeoutError):
            async with time_limit(SHORT):
                await for_ever()
    with pytest.raises(TimeoutError):
        async with time_limit(SHORT), time_limit(LONG):
            await for_ever()
    assert not current().cancelling()


def current() -> asyncio.Task[object]:
    task = asyncio.current_task()
    assert task is not None
    return task
