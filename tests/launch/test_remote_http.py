"""Requests to the loopback of another node, by its launcher."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from pdserve.errors import StateError
from pdserve.observe import remote_http
from pdserve.observe.metrics import read_metrics
from pdserve.observe.remote_http import client
from pdserve.run.directory import RunDir
from pdserve.run.inbox import Reply
from pdserve.run.state import DeploymentState
from pdserve.system.process import new_token
from pdserve.system.procfs import ProcessId

URL = "http://b.pdserve:8080"


@pytest.fixture
def through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> httpx.AsyncClient:
    """By a launcher that has lost the agent of that node, and says so."""
    gone = StateError("the agent of b is gone")
    reply = Reply(exit_code=gone.exit_code, message=gone.render())
    monkeypatch.setattr(remote_http, "ask", lambda *_, **__: reply)
    launcher = ProcessId(pid=1, start_ticks=1)
    state = DeploymentState(
        token=new_token(), name="fake", run_id="run-1", host="elsewhere", launcher=launcher, started_at=0.0
    )
    return client(RunDir(tmp_path), state)


def test_what_a_launcher_refuses_is_an_error_of_that_request(through: httpx.AsyncClient) -> None:
    """`verify` takes no other error for an answer that did not come."""

    async def asked() -> None:
        async with through:
            await through.get(f"{URL}/status")

    with pytest.raises(httpx.HTTPError, match="the agent of b is gone"):
        asyncio.run(asked())


def test_and_status_shows_its_reason(through: httpx.AsyncClient) -> None:
    async def asked() -> object:
        async with through:
            return await read_metrics(URL, through)

    assert asyncio.run(asked()) == "no answer: the agent of b is gone"
