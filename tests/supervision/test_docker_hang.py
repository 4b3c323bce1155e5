"""Whether the docker around an agent hangs, asked while its first word is awaited: by a `docker` of a test's own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.plan.node import Local
from pdserve.reach import containers
from pdserve.reach.containers import until_docker_hangs
from pdserve.reach.link import DOCKER_HANGS
from pdserve.reach.protocol import Gone, Hello, line_of
from pdserve.system.procfs import ProcessId
from tests.supervision.agents import LIMIT, linked

pytestmark = pytest.mark.process
ID = ProcessId(pid=1, start_ticks=1)
Says = Callable[[str], None]


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Says:
    """Writes the `docker` that is found: a line of shell, after which its calls can be counted."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    for name in ("_FIRST_SECONDS", "_EVERY_SECONDS"):
        monkeypatch.setattr(containers, name, 0.0)
    monkeypatch.setattr(containers, "_ANSWER_SECONDS", 1)

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


@pytest.mark.parametrize("answer", ["echo 20.10", "echo permission denied >&2; exit 1"], ids=["answers", "refuses"])
def test_one_that_answers_is_asked_again_until_it_does_not(docker: Says, tmp_path: Path, answer: str) -> None:
    """What keeps a container from coming is in the output of its own start, if docker refuses."""
    docker(f'if [ "$calls" -gt 2 ]; then exec sleep 1000; fi; {answer}')
    assert len(asked(tmp_path)) == 3


async def test_a_hang_before_the_first_word_is_a_lost_node() -> None:
    async def hangs() -> None:
        return

    async with linked("import sys; sys.stdin.read()", heartbeat=LIMIT, hang=hangs) as under_test:
        assert (await under_test.expect(Gone)).how == DOCKER_HANGS
        assert under_test.link.silent
    assert len(under_test.events) == 1


async def test_after_the_first_word_docker_is_not_asked() -> None:
    """The heartbeat is nearer to the agent."""
    hello = line_of(Hello(node="a", agent=ID, guard=ID, hostname="a")).decode()
    script = f"import sys; print({hello!r}, end='', flush=True); sys.stdin.read()"
    never = asyncio.Event()
    async with linked(script, heartbeat=LIMIT, hang=never.wait) as under_test:
        await under_test.expect(Hello)
        assert (len(under_test.events), under_test.link.silent) == (1, False)
