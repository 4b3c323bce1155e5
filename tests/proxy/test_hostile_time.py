"""Clients that are slow, silent, do not read, or vanish: they cost no memory, no engine and no one else's time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.proxy.raw import (
    ANSWER,
    BODY,
    EVENT,
    HEAD,
    MEGABYTE,
    PATH,
    STREAM_HEAD,
    RawClient,
    RawDeployment,
    Send,
    chunk,
    lent,
    post,
    raw_deployment,
    sends,
    whole,
)


@pytest.fixture
def impatient(tmp_path: Path) -> Iterator[RawDeployment]:
    """One for tests that wait for its limits of time."""
    limits = {"header_seconds": 1.5, "body_idle_seconds": 1.5, "body_seconds": 3.0, "keep_alive_seconds": 1.5}
    with raw_deployment(tmp_path, limits=limits) as raw:
        yield from lent(raw)


STOPS = (b"POST /v1/comp", HEAD, HEAD + b"content-length: 16\r\n\r\n", HEAD + b"content-length: 16\r\n\r\n" + BODY[:5])


def test_what_stops_arriving_is_a_408(impatient: RawDeployment) -> None:
    with ExitStack() as stack:
        stopping = [stack.enter_context(impatient.client()).send(beginning) for beginning in STOPS]
        silent = [stack.enter_context(impatient.client()).send(nothing) for nothing in (b"", b"\r\n\r\n")]
        served = stack.enter_context(impatient.client()).send(post(PATH, BODY))
        assert served.response().body == ANSWER
        answers = [client.response() for client in stopping]
        assert [(answer.status, answer.json()["error"]["code"]) for answer in answers] == [(408, 408)] * len(STOPS)
        assert {client.ended() for client in (*stopping, *silent, served)} == {b""}


def test_a_second_request_that_stops_arriving_is_a_408(impatient: RawDeployment) -> None:
    with impatient.client() as client:
        client.send(post(PATH, BODY) + HEAD)
        assert client.response().body == ANSWER
        assert client.response().status == 408
        assert client.ended() == b""


def test_a_body_that_never_pauses_and_never_ends_is_a_408(impatient: RawDeployment) -> None:
    with impatient.client() as client:
        client.send(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        # In single bytes it does not reach the limit of bodies first.
        client.flood(b"1\r\na\r\n", 100 * MEGABYTE)
        assert client.response().status == 408
        assert client.ended() == b""
    assert impatient.engine.seen == []


def test_a_client_that_reads_nothing_fills_no_memory(raw: RawDeployment) -> None:
    """Each reply is small, so no reply of its own is ever too much: together they would be."""
    before = raw.resident()
    with raw.client(receive_buffer=4096) as client:
        client.flood(b"GET /metrics HTTP/1.1\r\nhost: proxy\r\n\r\n" * 1000, 64 * MEGABYTE)
    assert raw.resident() - before < 64 * MEGABYTE


@pytest.mark.parametrize("offer", [(), ("connection: Upgrade", "upgrade: h2c")], ids=["plain", "upgrade"])
def test_a_request_behind_one_that_takes_long_does_not_end_that(
    impatient: RawDeployment, offer: tuple[str, ...]
) -> None:
    """The limit for requests that stop arriving is not one for answers: this one takes longer than any limit."""
    first = post(PATH, {"prompt": "first"})
    with impatient.client() as idle, impatient.client() as client:

        def slow(send: Send) -> None:
            # What closes an idle connection has had its turn at least once since then.
            idle.ended()
            with impatient.client() as another:
                another.ended()
            send(whole(ANSWER))

        impatient.engine.script = slow
        client.send(first)
        impatient.engine.wait(lambda engine: len(engine.seen) == 1)
        client.send(post(PATH, {"prompt": "second"}, *offer))
        impatient.engine.wait(lambda engine: engine.sent > 0)
        assert client.response().body == ANSWER
        impatient.engine.script = sends(whole(b'"second"'))
        assert client.response().status == 200


def test_a_reset_is_noticed_while_nothing_is_read(raw: RawDeployment) -> None:
    release = raw.hold()
    client = raw.client().send(post(PATH, BODY) * 20)
    raw.engine.wait(lambda engine: len(engine.seen) == 1)
    client.reset()
    raw.proxy.until("cancelled 499")
    release.set()


def test_clients_that_vanish_at_any_moment_leave_nothing_behind(raw: RawDeployment) -> None:
    """Closed or reset, after any number of bytes of the request or of the answer."""
    choose = random.Random(4)
    request = post(PATH, {"prompt": "x" * 2000, "stream": True})

    def stream(send: Send) -> None:
        send(STREAM_HEAD)
        for _ in range(50):
            send(chunk(EVENT * 20))
        send(b"0\r\n\r\n")

    raw.engine.script = stream
    for _ in range(150):
        client = raw.client()
        end = choose.choice([0, 10, 100, 1000, len(request)])
        client.send(request[:end])
        if end == len(request):
            for _ in range(choose.randrange(4)):
                client.socket.recv(choose.choice([1, 100, 10_000]))
        (client.close if choose.random() < 0.5 else client.reset)()
    raw.engine.wait_left()


# --- clients that are behind with their answers: who reads on is served, who does not loses the connection


PAUSE = 2.0
"""The longest of a client."""
LIMITS = {"body_idle_seconds": PAUSE, "keep_alive_seconds": 0.1}
TURN_BYTES = 32_768
TURNS = 9
"""Each takes about a quarter of a pause: together they are longer than two."""


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[RawDeployment]:
    """Its limits of time are those for clients that read slowly."""
    with raw_deployment(tmp_path, limits=LIMITS) as slow:
        yield from lent(slow)


def turn(slow: RawDeployment) -> None:
    """A moment by the proxy's own clock: it ends a connection that asks for nothing more, at the earliest after its
    limit, and looks twice a second."""
    with slow.client() as other:
        other.send(b"GET /ping HTTP/1.1\r\nhost: proxy\r\n\r\n").response()
        other.ended()


def read(client: RawClient, count: int) -> int:
    """So many bytes, or those before the end."""
    got = 0
    while got < count and (data := client.socket.recv(count - got)):
        got += len(data)
    return got


def test_a_client_that_reads_slowly_and_steadily_gets_its_whole_answer(slow: RawDeployment) -> None:
    """It is behind by megabytes all the time: more than the kernel's buffers and ours take."""
    body = b'"' + b"x" * (16 * MEGABYTE) + b'"'
    slow.engine.script = sends(whole(body))
    with slow.client(receive_buffer=4096) as client:
        client.send(post(PATH, BODY, "connection: close"))
        for _ in range(TURNS):
            assert read(client, TURN_BYTES) == TURN_BYTES
            turn(slow)
        rest = client.ended()
    assert rest.endswith(b"\r\n0\r\n\r\n")
    assert len(rest) > len(body) - TURNS * TURN_BYTES


def endless(send: Send) -> None:
    send(STREAM_HEAD)
    while True:
        send(chunk(EVENT * 1000))


def test_a_client_that_stops_to_read_loses_its_connection(slow: RawDeployment) -> None:
    slow.engine.script = endless
    with slow.client(receive_buffer=4096) as client:
        client.send(post(PATH, BODY))
        for _ in range(TURNS):
            assert read(client, TURN_BYTES) == TURN_BYTES
            turn(slow)
        slow.engine.wait_left()


def test_a_client_that_never_catches_up_loses_them_too(tmp_path: Path) -> None:
    """Or a few bytes now and then would hold a request of an engine for ever."""
    with raw_deployment(tmp_path, limits=LIMITS | {"body_seconds": 4.0}) as slow:
        slow.engine.script = endless
        with slow.client(receive_buffer=4096) as client:
            client.send(post(PATH, BODY))
            slow.engine.wait(lambda engine: engine.busy == 1)
            while slow.engine.busy:
                turn(slow)
                read(client, 4096)
        slow.unharmed()
