"""What one client can do to the others with well-formed requests, and with as many connections as there may be."""

from __future__ import annotations

import signal
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pdserve.pd.http.incoming import Budget, Request
from pdserve.pd.http.places import PLACE, PROBE_PLACE, PROBE_PLACES, Places
from pdserve.pd.http.reply import HttpReply
from pdserve.pd.requests.body import Body
from pdserve.pd.requests.dialects import BY_PATH, CHAT, COMPLETIONS
from pdserve.pd.requests.request import ClientRequest
from pdserve.pd.routing.ask import RoutingRequest
from pdserve.pd.serve.pair_canary import _NoClient
from tests.proxy.deployment import KEY, MODEL, Child, Deployment, proxy_config
from tests.proxy.raw import (
    ANSWER,
    HEALTH,
    MEGABYTE,
    PATH,
    RawClient,
    RawDeployment,
    RawEngine,
    post,
    raw_deployment,
)
from tests.tables import each_row


def test_large_uploads_leave_room_for_small_requests() -> None:
    budget = Budget(512 * MEGABYTE)
    uploads = 0
    size = 64 * MEGABYTE
    while size > 65_536:
        if budget.fits(size, more=size):
            budget.held += size
            uploads += 1
        else:
            size //= 2
    assert uploads > 8
    for _ in range(500):
        assert budget.fits(60_000, more=60_000)
        budget.held += 60_000


def test_a_request_of_thousands_of_headers_is_refused(tmp_path: Path) -> None:
    """Each takes 150 bytes of memory, however short it is."""
    with raw_deployment(tmp_path) as raw, RawClient(raw.proxy.port) as client:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: proxy\r\n" + b"a:\r\n" * 9_000
        assert client.send(head).response().status == 431


def test_the_prompt_that_counts_is_what_an_engine_computes_whatever_the_path() -> None:
    body = Body(b'{"messages":[],"tools":[{"description":"%b"}]}' % (b"word " * 1000))
    (_, begin, end), (_, first, last) = BY_PATH[b"/invocations"].prompt(body), CHAT.prompt(body)
    assert end - begin >= last - first > 5000


def test_a_client_that_leaves_what_decode_refuses_leaves_no_kv(deployment: Deployment) -> None:
    deployment.up()
    for _ in range(10):
        with deployment.proxy.open("/v1/completions", {"model": "tiny", "prompt": "x", "stop": ["a"] * 5}) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    deployment.idle()
    assert deployment.complete().status_code == 200


def test_many_who_ask_for_the_models_ask_an_engine_once(tmp_path: Path) -> None:
    with raw_deployment(tmp_path) as raw:
        before = len(raw.engine.seen)
        clients = [RawClient(raw.proxy.port) for _ in range(20)]
        for client in clients:
            client.send(b"GET /v1/models HTTP/1.1\r\nhost: proxy\r\n\r\n")
        assert {client.response().status for client in clients} == {200}
        for client in clients:
            client.close()
        asked = [seen for seen in raw.engine.seen[before:] if seen.line.startswith("GET /v1/models")]
        assert len(asked) < 20


# --- a stream that has begun keeps nothing of its request: nothing is sent again, and others need the room


STREAMS = 30
LIMITS: dict[str, Any] = {"limits": {"max_buffered_bytes": 4 * MEGABYTE}, "max_body_bytes": MEGABYTE}
"""Room for three of the requests below at once."""
WAYS: dict[str, dict[str, Any]] = {
    "mooncake": {},
    "nixl": {"nixl": True},
    "one engine": {"aggregated": 1},
}


def large(**members: object) -> dict[str, object]:
    """A request that is nearly as large as one may be, most of it in what engines do not read."""
    return {"model": MODEL, "prompt": "hello", "stream": True, "max_tokens": 2, "pad": "x" * 900_000} | members


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_its_room_in_memory_is_free_for_others(deployment: Deployment, way: dict[str, Any]) -> None:
    deployment.up(**way, **LIMITS)
    proxy, answers = deployment.proxy, deployment.fakes[-1]
    answers.script(hold="token")
    with ExitStack() as stack:

        def begin(count: int) -> list[RawClient]:
            streams = [stack.enter_context(RawClient(proxy.port)) for _ in range(count)]
            for stream in streams:
                stream.send(post(PATH, large()))
                assert stream.until(b"data: ").startswith(b"HTTP/1.1 200 ")
            return streams

        streams = begin(4)
        before = proxy.memory("VmRSS")
        streams += begin(STREAMS)
        assert proxy.memory("VmRSS") - before < STREAMS * MEGABYTE / 3
        answers.script(hold="")
        for stream in streams:
            stream.until(b"data: [DONE]\n\n")
    answers.wait(running=0, waiting=0)


def test_nothing_that_is_as_large_as_its_prompt_is_left() -> None:
    budget = Budget(MEGABYTE)
    incoming = Request("127.0.0.1", budget, tls=False)
    incoming.headers, incoming.target = [(b"x-request-id", b"r-1")], PATH.encode()
    body = Body(b'{"prompt":"%b"}' % (b"a" * 1000))
    assert incoming.take(body.raw)
    ask = RoutingRequest(body.raw, 10, 1010, tokens=[1] * 64, estimate=250)
    assert ask.prompt_chain(64) is not None
    assert ask.token_chain(16) is not None
    request = ClientRequest(COMPLETIONS, body, b"/", "r-1", b"x: y\r\n", ask, incoming=incoming)
    copy = request.copy()
    request.drop_content()
    assert (request.body.raw, request.headers, budget.held) == (b"{}", b"", 0)
    assert (ask.prompt, ask.tokens, ask.prompt_blocks, ask.chains, ask.estimate) == (b"", None, None, {}, 250)
    assert (incoming.parts, incoming.headers, incoming.path) == ([], [], PATH.encode())
    assert (copy.body, copy.headers, copy.request_id) == (body, b"x: y\r\n", "r-1")


@each_row("end", ["end", "cut", "lost"])
def test_a_reply_that_has_ended_in_any_way_keeps_nobody(end: str) -> None:
    """Who answers has the request, and would be kept by its own reply until the collector comes."""
    reply = HttpReply(_NoClient(), keep_alive=True, head_only=False, http10=False)
    calls: list[str] = []
    reply.on_gone, reply.on_pressure = (lambda: calls.append("gone")), (lambda _: calls.append("pressure"))
    getattr(reply, end)()
    assert [getattr(reply, name) for name in ("on_gone", "on_pressure")] == [None, None]
    assert calls == (["gone"] if end == "lost" else [])


# --- a client with as many connections as there may be does not keep the others out


MOST = 24
GREEDY, OTHER = "127.0.0.2", "127.0.0.3"
REQUEST = post("/v1/completions", {"prompt": "hi"})
HALF = REQUEST[: REQUEST.index(b"\r\n") + 2]
BODY_TO_COME = REQUEST[: REQUEST.index(b"\r\n\r\n") + 4]


@pytest.fixture
def tight(tmp_path: Path) -> Iterator[RawDeployment]:
    with raw_deployment(tmp_path, limits={"max_connections": MOST}) as raw:
        yield raw


@pytest.mark.parametrize("sent", [b"", HALF, BODY_TO_COME], ids=["nothing", "half a head", "a head and no body"])
def test_connections_without_a_request_make_room(tight: RawDeployment, sent: bytes) -> None:
    with ExitStack() as stack:
        for _ in range(4 * MOST):
            stack.enter_context(tight.client(address=GREEDY)).send(sent)
        with tight.client(address=OTHER) as client:
            answer = client.send(REQUEST).response()
        assert (answer.status, answer.body) == (200, ANSWER)


def test_a_client_with_few_connections_keeps_them(tight: RawDeployment) -> None:
    with ExitStack() as stack:
        few = [stack.enter_context(tight.client(address=OTHER)) for _ in range(3)]
        used = stack.enter_context(tight.client(address=GREEDY))
        assert few[0].send(REQUEST).response().status == used.send(REQUEST).response().status == 200
        few[1].send(HALF)
        for _ in range(4 * MOST):
            stack.enter_context(tight.client(address=GREEDY))
        assert tight.ask(HEALTH).status == 200  # all of them were accepted
        assert few[0].send(REQUEST).response().status == 200
        assert few[1].send(REQUEST[len(HALF) :]).response().status == 200
        assert few[2].send(REQUEST).response().status == 200
        assert used.send(REQUEST).response().status == 200, "who has asked before outlives who never did"


def test_when_all_are_busy_probes_are_answered_and_others_get_503(tight: RawDeployment) -> None:
    go_on = tight.hold()
    with ExitStack() as stack:
        stack.callback(go_on.set)
        asking = [stack.enter_context(tight.client(address=GREEDY)).send(REQUEST) for _ in range(MOST)]
        tight.engine.wait(lambda engine: engine.busy == MOST)
        # Also when a client holds the places for probes.
        sitting = [stack.enter_context(tight.client(address=GREEDY)) for _ in range(2 * PROBE_PLACES)]
        with tight.client(address=OTHER) as probe:
            assert [probe.send(HEALTH).response().status for _ in range(3)] == [200] * 3
        refused = tight.ask(REQUEST)
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert "as many clients" in refused.json()["error"]["message"]
        for client in sitting:
            client.close()
        go_on.set()
        assert [client.response().status for client in asking] == [200] * MOST
        ask_until_served(tight.proxy.port)


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
    worker = {"name": "aggregated-0", "role": "aggregated", "url": engine.url}
    file = tmp_path / "proxy.json"
    file.write_text(proxy_config(protocol="aggregated", workers=[worker]).model_dump_json())
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
