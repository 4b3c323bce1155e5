"""The near end of a program on a node, once that has ended."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pdserve.reach.link import Channel

pytestmark = pytest.mark.process

LIMIT = 60.0


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until the test is over."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as popen:
        yield popen
        popen.kill()


async def test_an_end_that_was_seen_is_not_waited_for_again(stranger: subprocess.Popen[bytes]) -> None:
    """By then its PID may be that of a process that lives as long as it likes."""

    popen = subprocess.Popen(["true"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with popen:
        channel = Channel(popen)
        code = await channel.exit_code(LIMIT)
        popen.pid = stranger.pid
        await asyncio.wait_for(channel.left(), LIMIT)
        await asyncio.wait_for(channel.kill(), LIMIT)
        channel.hang_up()
        outcome = code
    assert outcome == 0
    assert stranger.poll() is None
