"""Whether the docker around an agent hangs, asked while its first word is awaited: by a `docker` of a test's own."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.plan.node import Local
from pdserve.reach import docker_hang
from pdserve.reach.channel import Channel, line_of
from pdserve.reach.docker_hang import docker_hangs, until_docker_hangs
from pdserve.reach.link import DOCKER_HANGS, AgentLink
from pdserve.reach.protocol import Event, Gone, Hello
from pdserve.system.procfs import ProcessId

pytestmark = pytest.mark.process
LIMIT = 60.0
ID = ProcessId(pid=1, start_ticks=1)
Says = Callable[[str], None]


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Says:
    """Writes the `docker` that is found: a line of shell, after which its calls can be counted."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    for name in ("_FIRST_SECONDS", "_EVERY_SECONDS"):
        monkeypatch.setattr(docker_hang, name, 0.0)
    monkeypatch.setattr(docker_hang, "_ANSWER_SECONDS", 1)

    def says(line: str) -> None:
        program = folder / "docker"
        program.write_text(f'#!/bin/sh\necho "$*" >>{tmp_path}/calls\ncalls=$(wc -l <{tmp_path}/calls)\n{line}\n')
        program.chmod(0o755)

    return says


def asked(folder: Path) -> list[str]:
    (folder / "logs").mkdir()
    asyncio.run(asyncio.wait_for(until_docker_hangs(Local(), "a", folder / "logs"), LIMIT))
    return (folder / "calls").read_text().splitlines()


def test_a_docker_without_an_answer_hangs(docker: Says, tmp_path: Path) -> None:
    docker("exec sleep 1000")
    assert asked(tmp_path) == ["version --format={{.Server.Version}}"]


def test_one_that_answers_is_asked_again_until_it_does_not(docker: Says, tmp_path: Path) -> None:
    docker('if [ "$calls" -gt 2 ]; then exec sleep 1000; fi; echo 20.10')
    assert len(asked(tmp_path)) == 3


def test_one_that_refuses_does_not_hang(docker: Says, tmp_path: Path) -> None:
    """What keeps a container from coming is then in the output of its own start."""
    docker('if [ "$calls" -gt 2 ]; then exec sleep 1000; fi; echo permission denied >&2; exit 1')
    assert len(asked(tmp_path)) == 3


def test_a_slow_way_there_is_not_the_fault_of_docker() -> None:
    assert "or the way there" not in docker_hangs("a").cause
    assert "or the way there" in docker_hangs("a", or_way=True).cause


def heard(script: str, *, hangs: bool) -> tuple[list[Event], bool]:
    """What reaches the launcher of an agent, and whether its node counts as silent. `hangs`: its docker."""

    async def go() -> tuple[list[Event], bool]:
        argv = [sys.executable, "-c", script]
        popen = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        events: list[Event] = []
        arrived, never = asyncio.Event(), asyncio.Event()

        def receive(event: Event) -> None:
            events.append(event)
            arrived.set()

        async def until() -> None:
            if not hangs:
                await never.wait()

        link = AgentLink("a", Channel(popen), receive, heartbeat=LIMIT, hang=until)
        await asyncio.wait_for(arrived.wait(), LIMIT)
        until_now, silent = list(events), link.silent  # it leaves when the link is closed
        assert await link.close(LIMIT)
        assert popen.stdout is not None
        popen.stdout.close()
        return until_now, silent

    return asyncio.run(go())


def test_a_hang_before_the_first_word_is_a_lost_node() -> None:
    events, silent = heard("import sys; sys.stdin.read()", hangs=True)
    assert [type(event) for event in events] == [Gone]
    assert isinstance(events[0], Gone)
    assert events[0].how == DOCKER_HANGS
    assert silent


def test_after_the_first_word_docker_is_not_asked() -> None:
    """The heartbeat is nearer to the agent."""
    hello = line_of(Hello(node="a", agent=ID, guard=ID, hostname="a")).decode()
    script = f"import sys; print({hello!r}, end='', flush=True); sys.stdin.read()"
    events, silent = heard(script, hangs=False)
    assert [type(event) for event in events] == [Hello]
    assert not silent
