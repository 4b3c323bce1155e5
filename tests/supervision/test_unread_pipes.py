"""A launcher or an agent that does not read: what waits for it stays bounded, and nobody is held."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.node.agent import Agent
from pdserve.reach.link import Channel
from pdserve.reach.protocol import Gone, Progress, Pulse, Push, Stopped
from pdserve.system.cgroup import Made
from pdserve.system.shared_memory import ShmLedger, existing
from tests.supervision.agents import LIMIT, linked

MEGABYTE = 1024 * 1024


async def test_news_that_the_next_makes_worthless_do_not_wait_for_a_launcher_that_does_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read, write = os.pipe()

    with os.fdopen(write, "w") as stdout:
        with monkeypatch.context() as context:
            context.setattr(sys, "stdout", stdout)
            ledger = ShmLedger(tmp_path / "shm.json", strangers=existing())
            agent = Agent(node="a", run_dir=tmp_path, run_id="r", ledger=ledger, cgroups=Made(None))
        agent._emit(Progress(name="prefill-0", text="x" * 2 * MEGABYTE))
        waiting = agent._writer.waiting
        for _ in range(1000):
            agent._emit(Pulse())
            agent._emit(Progress(name="prefill-0", text="loading"))
        assert agent._writer.waiting == waiting
        # What happened is told, however late.
        agent._emit(Stopped(name="prefill-0", forced=False, seconds=1))
        assert agent._writer.waiting > waiting
        agent._writer.close()
        await agent._http.close()
    os.close(read)
    assert capsys.readouterr().err.count("the launcher does not read") == 1


CUT = '{"event":"progress","name":"prefill-0","text":"loading wei'


@pytest.mark.process
@pytest.mark.parametrize(
    ("last", "because", "how"),
    [
        (CUT + '{"event":"leaving","because":"killed","how":"it was killed by SIGKILL"}\n', "killed", "it was killed"),
        (CUT, None, "its pipe closed"),
        ('{"ev', None, "its pipe closed"),
        ('{"event":"nothing"}\n', None, "another version of pdserve"),
        ("This account is closed.", None, "another version of pdserve"),
    ],
)
async def test_an_agent_that_ends_in_the_middle_of_a_line_is_no_other_version(
    last: str, because: str | None, how: str
) -> None:
    async with linked("import sys; sys.stdout.write(sys.argv[1])", last) as under_test:
        gone = await under_test.expect(Gone)
    assert (gone.because, how in gone.how) == (because, True), gone.how


@pytest.mark.process
async def test_an_agent_that_does_not_read_its_orders_is_asked_nothing_more() -> None:
    async with linked("import time; time.sleep(600)") as under_test:
        under_test.link.send(Push(name="proxy", about="prefill-0", line="x" * 2 * MEGABYTE))
        answered = await under_test.link.ask("GET", "http://127.0.0.1:1/", seconds=60)
        under_test.popen.kill()
    assert answered.error == "the agent of a does not read its orders"
    assert len(under_test.events) == len(under_test.all(Gone))


@pytest.mark.process
async def test_an_end_that_was_seen_is_not_waited_for_again() -> None:
    """By then its PID may be that of a process that lives as long as it likes."""
    ended = subprocess.Popen(["true"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with ended, subprocess.Popen(["sleep", "600"]) as stranger:
        channel = Channel(ended)
        assert await channel.exit_code(LIMIT) == 0
        ended.pid = stranger.pid
        await asyncio.wait_for(channel.left(), LIMIT)
        await asyncio.wait_for(channel.kill(), LIMIT)
        channel.hang_up()
        assert stranger.poll() is None
        stranger.kill()
