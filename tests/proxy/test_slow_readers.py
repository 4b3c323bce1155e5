"""Clients that are behind with their answers: who reads on is served, who does not loses the connection."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.proxy.hostile import BODY, EVENT, MEGABYTE, PATH, STREAM_HEAD
from tests.proxy.raw import RawClient, RawDeployment, Send, chunk, post, raw_deployment, sends, whole

pytestmark = pytest.mark.process

PAUSE = 2.0
"""The longest of a client."""
LIMITS = {"body_idle_seconds": PAUSE, "keep_alive_seconds": 0.1}
TURN_BYTES = 32_768
TURNS = 10
"""Each takes about a quarter of a pause: together they are longer than two."""


@pytest.fixture(scope="module")
def module_raw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RawDeployment]:
    with raw_deployment(tmp_path_factory.mktemp("slow"), limits=LIMITS) as raw:
        yield raw


def turn(raw: RawDeployment) -> None:
    """A moment by the proxy's own clock: it ends a connection that asks for nothing more, at the earliest after its
    limit, and looks twice a second."""
    with raw.client() as other:
        other.send(b"GET /ping HTTP/1.1\r\nhost: proxy\r\n\r\n").response()
        other.ended()


def read(client: RawClient, count: int) -> int:
    """So many bytes, or those before the end."""
    got = 0
    while got < count and (data := client.socket.recv(count - got)):
        got += len(data)
    return got


def test_a_client_that_reads_slowly_and_steadily_gets_its_whole_answer(raw: RawDeployment) -> None:
    """It is behind by megabytes all the time: more than the kernel's buffers and ours take."""
    body = b'"' + b"x" * (16 * MEGABYTE) + b'"'
    raw.engine.script = sends(whole(body))
    with raw.client(receive_buffer=4096) as client:
        client.send(post(PATH, BODY, "connection: close"))
        for _ in range(TURNS):
            assert read(client, TURN_BYTES) == TURN_BYTES
            turn(raw)
        rest = client.ended()
    assert rest.endswith(b"\r\n0\r\n\r\n")
    assert len(rest) > len(body) - TURNS * TURN_BYTES


def test_what_is_sent_behind_the_last_request_takes_nothing_of_its_answer(tmp_path: Path) -> None:
    """The client reads nothing for a while when the answer is complete here. How much of it the kernel has then depends
    on the kernel: so there are answers of several sizes."""
    sizes = range(5 * MEGABYTE // 2, 7 * MEGABYTE // 2, MEGABYTE // 8)
    with raw_deployment(tmp_path, limits={"keep_alive_seconds": 0.1}) as raw, ExitStack() as clients:
        waiting: list[RawClient] = []
        for size in sizes:
            raw.engine.script = sends(whole(b'"' + b"x" * size + b'"'))
            client = clients.enter_context(raw.client(receive_buffer=4096))
            client.send(post(PATH, BODY, "connection: close") + b"x")
            waiting.append(client)
            raw.engine.wait(lambda engine: len(engine.seen) == len(waiting))
        for _ in range(TURNS):
            turn(raw)
        answers = [client.response() for client in waiting]
    assert [(answer.complete, len(answer.body)) for answer in answers] == [(True, size + 2) for size in sizes]


def endless(send: Send) -> None:
    send(STREAM_HEAD)
    while True:
        send(chunk(EVENT * 1000))


def test_a_client_that_stops_to_read_loses_its_connection_and_its_engine(raw: RawDeployment) -> None:
    raw.engine.script = endless
    with raw.client(receive_buffer=4096) as client:
        client.send(post(PATH, BODY))
        for _ in range(TURNS):
            assert read(client, TURN_BYTES) == TURN_BYTES
            turn(raw)
        raw.engine.wait_left()


def test_a_client_that_never_catches_up_loses_them_too(tmp_path: Path) -> None:
    """Or a few bytes now and then would hold a request of an engine for ever."""
    with raw_deployment(tmp_path, limits=LIMITS | {"body_seconds": 4.0}) as raw:
        raw.engine.script = endless
        with raw.client(receive_buffer=4096) as client:
            client.send(post(PATH, BODY))
            raw.engine.wait(lambda engine: engine.busy == 1)
            while raw.engine.busy:
                turn(raw)
                read(client, 4096)
        raw.unharmed()
