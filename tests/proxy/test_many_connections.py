"""A client with as many connections as there may be does not keep the others out."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pdserve.pd.http.places import PLACE, PROBE_PLACE, PROBE_PLACES, Places
from tests.proxy.deployment import KEY, Child, Deployment
from tests.proxy.raw import ANSWER, HEALTH, RawClient, RawDeployment, RawEngine, post, raw_deployment

MOST = 24
GREEDY, OTHER = "127.0.0.2", "127.0.0.3"
REQUEST = post("/v1/completions", {"prompt": "hi"})
HALF = REQUEST[: REQUEST.index(b"\r\n") + 2]
BODY_TO_COME = REQUEST[: REQUEST.index(b"\r\n\r\n") + 4]


@pytest.fixture
def raw(tmp_path: Path) -> Iterator[RawDeployment]:
    with raw_deployment(tmp_path, limits={"max_connections": MOST}) as raw:
        yield raw


@pytest.mark.parametrize("sent", [b"", HALF, BODY_TO_COME], ids=["nothing", "half a head", "a head and no body"])
def test_connections_without_a_request_make_room(raw: RawDeployment, sent: bytes) -> None:
    with ExitStack() as stack:
        for _ in range(4 * MOST):
            stack.enter_context(raw.client(address=GREEDY)).send(sent)
        with raw.client(address=OTHER) as client:
            answer = client.send(REQUEST).response()
        assert (answer.status, answer.body) == (200, ANSWER)


def test_a_client_with_few_connections_keeps_them(raw: RawDeployment) -> None:
    with ExitStack() as stack:
        few = [stack.enter_context(raw.client(address=OTHER)) for _ in range(3)]
        assert few[0].send(REQUEST).response().status == 200
        few[1].send(HALF)
        for _ in range(4 * MOST):
            stack.enter_context(raw.client(address=GREEDY))
        assert raw.ask(HEALTH).status == 200  # all of them were accepted
        assert few[0].send(REQUEST).response().status == 200
        assert few[1].send(REQUEST[len(HALF) :]).response().status == 200
        assert few[2].send(REQUEST).response().status == 200


def test_who_has_asked_before_outlives_who_never_did(raw: RawDeployment) -> None:
    with ExitStack() as stack:
        used = stack.enter_context(raw.client())
        assert used.send(REQUEST).response().status == 200
        for _ in range(4 * MOST):
            stack.enter_context(raw.client())
        assert raw.ask(HEALTH).status == 200
        assert used.send(REQUEST).response().status == 200


def test_when_all_are_busy_probes_are_answered_and_others_get_503(raw: RawDeployment) -> None:
    go_on = raw.hold()
    with ExitStack() as stack:
        stack.callback(go_on.set)
        asking = [stack.enter_context(raw.client(address=GREEDY)).send(REQUEST) for _ in range(MOST)]
        raw.engine.wait(lambda engine: engine.busy == MOST)
        # Also when a client holds the places for probes.
        sitting = [stack.enter_context(raw.client(address=GREEDY)) for _ in range(2 * PROBE_PLACES)]
        with raw.client(address=OTHER) as probe:
            assert [probe.send(HEALTH).response().status for _ in range(3)] == [200] * 3
        refused = raw.ask(REQUEST)
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert "as many clients" in refused.json()["error"]["message"]
        for client in sitting:
            client.close()
        go_on.set()
        assert [client.response().status for client in asking] == [200] * MOST
        ask_until_served(raw.proxy.port)


def test_that_no_connection_can_be_closed_is_remembered_for_a_moment() -> None:
    """Looking at thousands of connections for each newcomer would leave no time for anybody."""
    looked: list[int] = []

    class Answering:
        peer = GREEDY
        congested = False

        @property
        def answering(self) -> bool:
            looked.append(1)
            return True

    held: Any = {Answering() for _ in range(MOST)}
    places = Places()
    assert [places.for_new(held, MOST, now) for now in (1.0, 1.01, 1.02, 1.05)] == [PROBE_PLACE] * 4
    assert len(looked) == MOST
    assert places.for_new(held, MOST, 2.0) == PROBE_PLACE
    assert len(looked) == 2 * MOST
    held.pop()
    assert places.for_new(held, MOST, 2.01) == PLACE


def ask_until_served(port: int) -> None:
    """The proxy hears of closed connections a moment later."""
    served = False
    while not served:
        with RawClient(port) as client:
            served = client.send(REQUEST).response().status == 200


# --- a proxy whose files are few: clients that do nothing take none from the connections to engines


FILES = 256


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
    ask_until_served(proxy.port)
