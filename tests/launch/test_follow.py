"""What a command learns of its launcher: its start, its answers, its end, also where a disk is full."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from pdserve.errors import ReportedError, StateError
from pdserve.observe import remote_http
from pdserve.observe.metrics import read_metrics
from pdserve.observe.remote_http import client
from pdserve.operations.launcher_process import follow
from pdserve.run.directory import RunDir
from pdserve.run.inbox import Down, Reply, answer, ask, take
from pdserve.system.process import Child, send, spawn
from tests.launch.records import recorded_state

pytestmark = pytest.mark.process


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, "fake", "run-1")


@pytest.fixture
def launcher(run: RunDir) -> Iterator[Child]:
    """One that lives and writes no history."""
    log = run.logs / "launcher.log"
    child = spawn(["sleep", "1000"], env=os.environ, log=log, marker="run-1/launcher", control_stdin=False)
    yield child
    send(child.identity, signal.SIGKILL)
    asyncio.run(child.wait())


@pytest.fixture
def over(run: RunDir) -> Child:
    """One whose start was stopped, and that has said so as it could: by its exit code."""
    log = run.logs / "launcher.log"
    child = spawn(["sh", "-c", "exit 130"], env=os.environ, log=log, marker="run-1/launcher", control_stdin=False)
    asyncio.run(child.wait())
    return child


@pytest.mark.parametrize("recorded", [True, False])
def test_a_start_that_was_asked_to_stop_is_no_failure_of_its_launcher(
    run: RunDir, over: Child, launcher: Child, recorded: bool
) -> None:
    """By its history, with whatever code it ends; or by its code, where a full disk has swallowed the history."""
    if recorded:
        run.append_event("down", phase="stopped", clean=True)
        send(launcher.identity, signal.SIGINT)
        asyncio.run(launcher.wait())
    with pytest.raises(ReportedError) as stopped:
        follow(run, launcher if recorded else over, lambda event: None, keep=False)
    assert stopped.value.exit_code == 130
    assert "it was asked to stop before it was ready" in str(stopped.value)


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_closed_terminal_ends_who_looks_on_unless_it_has_more_to_do(
    run: RunDir, launcher: Child, goes_on: bool
) -> None:
    run.append_event("note", text="it starts")
    run.append_event("up")
    signal.signal(signal.SIGHUP, signal.default_int_handler)
    handlers = []
    follow(run, launcher, lambda _: handlers.append(signal.getsignal(signal.SIGHUP)), keep=False, goes_on=goes_on)
    assert handlers == 2 * [signal.default_int_handler if goes_on else signal.SIG_DFL]


@pytest.mark.parametrize("last", [Reply(exit_code=5, message="an agent is still stopping its processes"), None])
def test_the_last_word_of_a_launcher_that_ends_is_the_answer(run: RunDir, last: Reply | None) -> None:
    """It has taken the request, and has ended when it is looked for."""

    def alive() -> bool:
        for name, _ in take(run):
            if last is not None:
                answer(run, name, last)
        return False

    if last is not None:
        assert ask(run, Down(), seconds=60, alive=alive) == last
    else:
        with pytest.raises(StateError, match="ended before it answered"):
            ask(run, Down(), seconds=60, alive=alive)
    assert list(run.inbox.iterdir()) == []


# Requests to the loopback of another node, by its launcher


URL = "http://b.pdserve:8080"


async def test_what_a_launcher_refuses_is_an_error_of_that_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has lost the agent of that node. `verify` takes no other error for an answer that did not come."""
    gone = StateError("the agent of b is gone")
    reply = Reply(exit_code=gone.exit_code, message=gone.render())
    monkeypatch.setattr(remote_http, "ask", lambda *_, **__: reply)
    async with client(RunDir(tmp_path), recorded_state(host="elsewhere")) as through:
        with pytest.raises(httpx.HTTPError, match="the agent of b is gone"):
            await through.get(f"{URL}/status")
        assert await read_metrics(URL, through) == "no answer: the agent of b is gone"
