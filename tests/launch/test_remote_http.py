"""Requests to the loopback of another node, by its launcher."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from pdserve.errors import StateError
from pdserve.observe import remote_http
from pdserve.observe.metrics import read_metrics
from pdserve.observe.remote_http import client
from pdserve.run.directory import RunDir
from pdserve.run.inbox import Reply
from tests.launch.records import recorded_state

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
