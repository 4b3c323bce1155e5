"""How the proxy starts, what it refuses to start with, and how it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.proxy import load_config, start_of
from tests.proxy.deployment import Deployment
from tests.proxy.raw import ANSWER, RawDeployment, post, raw_deployment
from tests.tables import each_row

CONFIG: dict[str, Any] = {
    "host": "127.0.0.1",
    "port": 8000,
    "processes": 1,
    "served_name": "m",
    "protocol": "mooncake",
    "workers": [{"name": "prefill-0", "role": "prefill", "url": "http://h:1", "bootstrap_url": "http://h:2"}],
    "request_timeout_seconds": 1,
    "connect_timeout_seconds": 1,
    "drain_seconds": 1,
    "max_body_bytes": 1,
}


@pytest.mark.process
@each_row(
    "content, message",
    [
        (CONFIG | {"port": "many"}, "port"),
        (CONFIG | {"workers": [{"name": "prefill-0", "role": "prefill", "url": "http://h:1"}]}, "bootstrap_url"),
        (CONFIG | {"processes": 2, "unknown": 1}, "unknown"),
        ([], "proxy.json"),
        (None, "proxy.json"),
    ],
)
def test_a_bad_configuration_is_exit_code_2_with_its_cause(tmp_path: Path, content: object, message: str) -> None:
    path = tmp_path / "proxy.json"
    if content is not None:
        path.write_text(json.dumps(content))
    argv = [sys.executable, "-m", "pdserve.proxy", "--config", str(path), "--no-control"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr


def test_without_a_control_channel_all_workers_are_ready(deployment: Deployment) -> None:
    deployment.up(fresh=True)
    ready = deployment.proxy.http.get("/ready")
    assert (ready.status_code, ready.json()["ready"]) == (200, True)


def test_no_proxy_of_the_environment_is_used(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    deployment.up(fresh=True)
    assert deployment.complete().status_code == 200


@pytest.mark.process
def test_no_process_has_in_memory_what_only_others_need() -> None:
    """The parent: what starts members. A member: nothing of the admin's endpoints, nor of features that are off."""
    for module, without in (
        (
            "pdserve.proxy",
            {"asyncio", "dataclasses", "inspect", "ssl", "pydantic", "starlette", "pdserve.pd.serve.member"},
        ),
        ("pdserve.pd.serve.member", {"fastapi", "uvicorn", "zmq", "httpx", "opentelemetry", "pdserve.pd.serve.admin"}),
    ):
        program = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert not without & set(json.loads(done.stdout))


@each_row("left_out", ["", "host", "processes"])
def test_so_the_parent_reads_what_it_needs_of_the_configuration_itself(tmp_path: Path, left_out: str) -> None:
    path = tmp_path / "proxy.json"
    path.write_text(json.dumps({name: value for name, value in CONFIG.items() if name != left_out}))
    start, whole = start_of(path), load_config(path)
    assert (start.host, start.port, start.processes) == (whole.host, whole.port, whole.processes)


# --- a process that ends, or leaves its place to a successor, answers what clients have begun to ask


REQUEST = post("/v1/completions", {"prompt": "hello world"})


@pytest.fixture
def raw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RawDeployment]:
    """The clients' own limits of time are far away."""
    limits = {"header_seconds": 60, "body_idle_seconds": 60}
    with raw_deployment(tmp_path_factory.mktemp("drain"), drain_seconds=60, limits=limits) as raw:
        yield raw


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR2], ids=["end", "rolling restart"])
@pytest.mark.parametrize("end", [-10, 30], ids=["half a body", "half a head"])
def test_a_request_that_is_arriving_when_the_drain_begins_is_answered(
    raw: RawDeployment, signum: signal.Signals, end: int
) -> None:
    with raw.client() as client, raw.client() as idle:
        client.send(REQUEST[:end])
        # It came later, and is answered: so the proxy has what came before.
        assert idle.send(REQUEST).response().status == 200
        raw.proxy.process.send_signal(signum)
        # The drain has begun: connections without a request are closed.
        assert idle.ended() == b""
        answer = client.send(REQUEST[end:]).response()
        assert (answer.status, answer.body) == (200, ANSWER)
        assert client.ended() == b""
    if signum == signal.SIGTERM:
        assert raw.proxy.process.wait() == 0
    else:
        raw.proxy.until("the old proxy process 0 has ended")
        assert raw.ask(REQUEST).status == 200


def test_what_stops_arriving_does_not_hold_up_the_end(tmp_path_factory: pytest.TempPathFactory) -> None:
    limits = {"header_seconds": 1.5, "body_idle_seconds": 1.5}
    with (
        raw_deployment(tmp_path_factory.mktemp("drain"), drain_seconds=600, limits=limits) as raw,
        raw.client() as client,
        raw.client() as idle,
    ):
        client.send(REQUEST[:-10])
        assert idle.send(REQUEST).response().status == 200
        raw.proxy.process.terminate()
        assert client.response().status == 408
        assert raw.proxy.process.wait() == 0
