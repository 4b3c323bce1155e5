"""A process that ends, or leaves its place to a successor, answers what clients have begun to ask."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.proxy.raw import ANSWER, RawDeployment, post, raw_deployment

pytestmark = pytest.mark.process

REQUEST = post("/v1/completions", {"prompt": "hello world"})


@pytest.fixture
def raw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RawDeployment]:
    """The clients' own limits of time are far away."""
    with raw_deployment(tmp_path_factory.mktemp("drain"), drain_seconds=60) as raw:
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


def test_a_request_that_stops_arriving_does_not_hold_up_the_end_for_longer_than_its_own_limit(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
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
