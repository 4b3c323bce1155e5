"""A proxy whose files are few: clients that do nothing take none from the connections to engines."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.proxy.deployment import KEY, Child, Deployment
from tests.proxy.raw import ANSWER, RawClient, RawEngine, post

pytestmark = pytest.mark.process

FILES = 256
REQUEST = post("/v1/completions", {"prompt": "hi"})


@pytest.fixture
def engine() -> Iterator[RawEngine]:
    engine = RawEngine()
    yield engine
    engine.close()


@pytest.fixture
def proxy(tmp_path: Path, engine: RawEngine) -> Iterator[Child]:
    with Deployment(tmp_path) as deployment:
        worker = {"name": "aggregated-0", "role": "aggregated", "url": engine.url}
        config = deployment.config("aggregated", workers=[worker])
    file = tmp_path / "proxy.json"
    file.write_text(config.model_dump_json())
    program = [sys.executable, "-m", "pdserve.proxy", "--config", str(file), "--no-control"]
    proxy = Child(["sh", "-c", f'ulimit -n {FILES}; exec "$@"', "sh", *program], {"PDSERVE_ENGINE_KEY": KEY})
    try:
        proxy.listens(int(proxy.until(r"serving on http://127.0.0.1:(\d+)")[1]))
        yield proxy
    finally:
        proxy.end(signal.SIGTERM)


def test_idle_clients_up_to_the_limit_leave_requests_their_engines(proxy: Child, engine: RawEngine) -> None:
    (lowered,) = [line for line in proxy.log if "max_connections is" in line]
    assert "not 8192" in lowered
    active = [RawClient(proxy.port) for _ in range(12)]
    for client in active:
        assert client.send(REQUEST).response().status == 200
    idle = [RawClient(proxy.port) for _ in range(2 * FILES)]
    answers = [client.send(REQUEST).response() for client in active]
    assert [(answer.status, answer.body) for answer in answers] == [(200, ANSWER)] * 12
    for client in (*active, *idle):
        client.close()
    while True:
        with RawClient(proxy.port) as client:
            if client.send(REQUEST).response().status == 200:
                break
