"""A loop that takes requests outlives each of its steps, and its log says what a step has raised."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.launcher import UnendingLoop


def torn() -> None:
    raise ValueError("embedded null byte")


def test_a_step_that_fails_is_logged_once_and_the_next_one_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    taken: list[str] = []

    async def steps() -> None:
        loop = UnendingLoop()
        for step in (torn, torn, lambda: taken.append("next")):
            await loop.step(step)

    asyncio.run(steps())
    assert taken == ["next"]
    assert capsys.readouterr().err.count("ValueError: embedded null byte") == 1
