"""Engines that are broken or no engines at all: a clear error for the client, and the proxy serves on."""

from __future__ import annotations

import json
import select
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.proxy.raw import (
    ANSWER,
    EVENT,
    PATH,
    SECONDS,
    SSE,
    CutError,
    RawDeployment,
    Response,
    Script,
    Send,
    chunk,
    head,
    post,
    raw_deployment,
    sends,
    whole,
)
from tests.tables import each_row

STREAM = {"prompt": "hi", "stream": True}


@pytest.fixture(scope="module", params=["one engine", "two legs"])
def module_raw(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RawDeployment]:
    with raw_deployment(tmp_path_factory.mktemp("raw"), split=request.param == "two legs") as raw:
        yield raw


def forever(beginning: bytes, again: bytes) -> Script:
    """Wait until the proxy has had enough."""

    def script(send: Send) -> None:
        send(beginning)
        while True:
            send(again)

    return script


GARBAGE: dict[str, Script] = {
    "nothing": sends(cut=True),
    "half a head": sends(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n", cut=True),
    "no HTTP": sends(b"\x00\x01\x02\x03" * 100),
    "length and chunked": sends(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}"),
    "a length that is too long": sends(head(length=len(ANSWER) + 10) + ANSWER, cut=True),
    "a chunk that is no chunk": sends(head() + b"zz\r\n{}\r\n0\r\n\r\n"),
    "chunks without an end": sends(head() + chunk(ANSWER), cut=True),
    "an upgrade": sends(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n"),
    "no content": sends(b"HTTP/1.1 204 No Content\r\n\r\n"),
    "a redirect": sends(b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n"),
    "a stream without an event": sends(head(SSE) + b"0\r\n\r\n"),
    "a stream that is cut before its first event": sends(
        head(SSE) + chunk(b": hello\n\n") + chunk(b"data: "), cut=True
    ),
    "an error page": sends(
        head("text/html", None, status="500 Oops") + chunk(b"<html>http://127.0.0.1:8000</html>") + b"0\r\n\r\n"
    ),
    "an error that is a list": sends(head(length=2, status="500 Oops") + b"[]"),
    "an error that is null": sends(head(length=15, status="500 Oops") + b'{"error": null}'),
    "a status beyond all": sends(head(length=2, status="999 What") + b"{}"),
    "a header without an end": forever(b"HTTP/1.1 200 OK\r\nx-long: ", b"a" * 65_536),
    "headers without an end": forever(b"HTTP/1.1 200 OK\r\n", b"x-more: 1\r\n" * 1000),
    "provisional answers without an end": forever(b"", b"HTTP/1.1 102 Processing\r\n\r\n" * 1000),
    "a chunk extension without an end": forever(head() + b"2;", b"a" * 65_536),
    "an error without an end": forever(head(status="500 Oops"), chunk(b"x" * 65_536)),
}


def read_all(connection: socket.socket) -> None:
    while connection.recv(65_536):
        pass


def clear_error(answer: Response) -> dict[str, Any]:
    assert answer.headers["content-type"] == "application/json"
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == answer.status
    assert "127.0.0.1" not in answer.body.decode()
    assert "<html>" not in error["message"]
    return error


@each_row("stream", [False, True])
@each_row("script", GARBAGE.values())
def test_what_is_no_answer_is_a_clear_error(raw: RawDeployment, script: Script, stream: bool) -> None:
    raw.engine.script = script
    answer = raw.ask(post(PATH, {"prompt": "hi", "stream": stream}))
    assert 500 <= answer.status <= 999
    clear_error(answer)
    raw.engine.wait_left()


@pytest.mark.parametrize("module_raw", ["two legs"], indirect=True)
@each_row("script", GARBAGE.values())
def test_a_prefill_without_an_answer_is_a_clear_error(script: Script, raw: RawDeployment) -> None:
    prefill, decode = raw.engines
    prefill.seen.clear()
    prefill.script = script

    def waits_for_kv(_: Send) -> None:
        prefill.wait(lambda engine: engine.busy == 0 and bool(engine.seen))
        raise CutError

    decode.script = waits_for_kv
    answer = raw.ask(post(PATH, STREAM))
    assert 500 <= answer.status <= 999
    clear_error(answer)
    prefill.wait_left()


def test_provisional_answers_are_passed_over(raw: RawDeployment) -> None:
    raw.engine.script = sends(
        b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n", whole(ANSWER)
    )
    answer = raw.ask(post(PATH, {"prompt": "hi"}))
    assert (answer.status, answer.body) == (200, ANSWER)


def test_what_comes_with_an_answer_and_was_not_asked_for_is_dropped(raw: RawDeployment) -> None:
    """As after a length that is too short: it is neither added to the answer nor taken for the next one."""
    raw.engine.script = sends(whole(ANSWER) + whole(b'{"not": "asked for"}'))
    with raw.client() as client:
        for _ in range(20):
            answer = client.send(post(PATH, {"prompt": "hi"})).response()
            assert (answer.status, answer.body) == (200, ANSWER)


CUTS = {
    "between events": chunk(EVENT),
    "in an event": chunk(EVENT[:10]),
    "in a chunk": chunk(EVENT)[:-10],
}


@each_row("rest", CUTS.values())
def test_a_stream_that_breaks_ends_with_an_error_event(raw: RawDeployment, rest: bytes) -> None:
    begun = threading.Event()

    def breaks(send: Send) -> None:
        send(head(SSE) + chunk(EVENT))
        begun.wait(SECONDS)
        send(rest)
        raise CutError

    raw.engine.script = breaks
    with raw.client() as client:
        client.send(post(PATH, STREAM)).socket.recv(1, socket.MSG_PEEK)
        begun.set()
        answer = client.response()
    assert (answer.status, answer.complete) == (200, True)
    assert answer.body.startswith(EVENT)
    *_, last = answer.events()
    assert last["error"]["code"] == 502
    assert "127.0.0.1" not in answer.body.decode()


def test_a_stream_without_its_last_event_ends_with_an_error(raw: RawDeployment) -> None:
    raw.engine.script = sends(head(SSE), chunk(EVENT), b"0\r\n\r\n")
    *_, last = raw.ask(post(PATH, STREAM)).events()
    assert last["error"]["code"] == 502


@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_a_long_answer_that_breaks_is_visibly_cut(raw: RawDeployment, version: str) -> None:
    """More than is held back: its beginning is at the client already, and half a JSON document is not completed."""
    begun = threading.Event()

    def breaks(send: Send) -> None:
        send(head(length=4_000_000) + b'"' + b"x" * 2_000_000)
        begun.wait(SECONDS)
        raise CutError

    raw.engine.script = breaks
    with raw.client() as client:
        client.send(post(PATH, {"prompt": "hi"}, version=version))
        assert select.select([client.socket], [], [], SECONDS)[0]
        begun.set()
        if version == "1.1":
            answer = client.response()
            assert (answer.status, answer.complete) == (200, False)
        else:
            with pytest.raises(ConnectionResetError):
                read_all(client.socket)


@each_row("piece", [b"data: " + b"x" * 65_536, b": still here\n\n" * 4000])
def test_a_stream_without_an_event_does_not_grow_our_memory(raw: RawDeployment, piece: bytes) -> None:
    before = raw.resident()
    raw.engine.script = forever(head(SSE), chunk(piece))
    with raw.client() as client:
        client.send(post(PATH, STREAM))
        for _ in range(500):
            assert client.socket.recv(65_536)
    raw.engine.wait_left()
    assert raw.resident() - before < 32 << 20


def test_errors_of_engines_keep_their_reason_without_what_is_internal(raw: RawDeployment) -> None:
    error = {"error": {"message": "no such adapter", "type": "NotFoundError", "param": "model", "code": 404}}
    body = json.dumps(error).encode()
    raw.engine.script = sends(head(length=len(body), status="404 Not Found") + body)
    answer = raw.ask(post(PATH, {"prompt": "hi"}))
    assert (answer.status, answer.json()) == (404, error)
