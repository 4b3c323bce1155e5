"""Clients that mean harm or are broken: a clear answer or the end of their connection, and the proxy serves on."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from tests.proxy.raw import (
    ANSWER,
    SECONDS,
    CutError,
    RawDeployment,
    Say,
    chunk,
    head,
    post,
    raw_deployment,
    says,
    whole,
)

pytestmark = pytest.mark.process

PATH = "/v1/completions"
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: proxy\r\ncontent-type: application/json\r\n"
BODY = b'{"prompt": "hi"}'
STREAM_HEAD = head("text/event-stream")
EVENT = b'data: {"choices": [{"text": "a"}]}\n\n'
METRICS = b"GET /metrics HTTP/1.1\r\nhost: proxy\r\n\r\n"
MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def module_raw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RawDeployment]:
    limits = {"max_header_bytes": 16_384}
    with raw_deployment(tmp_path_factory.mktemp("raw"), limits=limits, max_body_bytes=2 * MEGABYTE) as raw:
        yield raw


@pytest.fixture
def raw(module_raw: RawDeployment) -> Iterator[RawDeployment]:
    """One for this module: whatever a test has done to it, it must serve on. Its limits of time are the usual ones, so
    that a slow machine is no client that means harm."""
    module_raw.engine.seen.clear()
    yield module_raw
    module_raw.unharmed()


@pytest.fixture(scope="module")
def module_impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RawDeployment]:
    limits = {"header_seconds": 1.5, "body_idle_seconds": 1.5, "body_seconds": 3.0, "keep_alive_seconds": 1.5}
    with raw_deployment(tmp_path_factory.mktemp("impatient"), limits=limits) as raw:
        yield raw


@pytest.fixture
def impatient(module_impatient: RawDeployment) -> Iterator[RawDeployment]:
    """Another one, for tests that wait for its limits of time."""
    module_impatient.engine.seen.clear()
    yield module_impatient
    module_impatient.unharmed()


SMUGGLED = {
    "length and chunked": HEAD + b"content-length: 16\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked and length": HEAD + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": HEAD + b"content-length: 16\r\ncontent-length: 3\r\n\r\n" + BODY,
    "the same length twice": HEAD + b"content-length: 16\r\ncontent-length: 16\r\n\r\n" + BODY,
    "a list of lengths": HEAD + b"content-length: 16, 16\r\n\r\n" + BODY,
    "a signed length": HEAD + b"content-length: +16\r\n\r\n" + BODY,
    "an empty length": HEAD + b"content-length: \r\n\r\n" + BODY,
    "a length beyond all numbers": HEAD + b"content-length: 99999999999999999999999\r\n\r\n" + BODY,
    "an unknown coding": HEAD + b"transfer-encoding: xchunked\r\n\r\n10\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunked not last": HEAD + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "chunked twice": HEAD + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "a blank before the colon": HEAD + b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n",
    "a control character": HEAD + b"transfer-encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "a folded header": HEAD + b"traceparent: a\r\n authorization: b\r\ncontent-length: 16\r\n\r\n" + BODY,
    "bare line feeds": (HEAD + b"content-length: 16\r\n\r\n").replace(b"\r\n", b"\n") + BODY,
    "one bare line feed": HEAD + b"traceparent: a\ncontent-length: 16\r\n\r\n" + BODY,
    "a bare carriage return": HEAD + b"traceparent: a\rauthorization: b\r\ncontent-length: 16\r\n\r\n" + BODY,
    "NUL in a value": HEAD + b"traceparent: a\x00b\r\ncontent-length: 16\r\n\r\n" + BODY,
    "NUL in a name": HEAD + b"trace\x00parent: a\r\ncontent-length: 16\r\n\r\n" + BODY,
    "chunks with line feeds": HEAD + b"transfer-encoding: chunked\r\n\r\n10\n" + BODY + b"\n0\n\n",
    "a negative chunk": HEAD + b"transfer-encoding: chunked\r\n\r\n-10\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a hexadecimal prefix": HEAD + b"transfer-encoding: chunked\r\n\r\n0x10\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a chunk beyond all numbers": HEAD + b"transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n" + BODY,
    "a version that there is not": b"POST /v1/completions HTTP/1.7\r\ncontent-length: 16\r\n\r\n" + BODY,
    "HTTP/0.9": b"GET /health\r\n\r\n",
    "no host": b"POST /v1/completions HTTP/1.1\r\ncontent-length: 16\r\n\r\n" + BODY,
    "two hosts": HEAD + b"host: other\r\ncontent-length: 16\r\n\r\n" + BODY,
    "compressed and chunked": HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n" + chunk(BODY) + b"0\r\n\r\n",
    "compressed, then chunked": HEAD
    + b"transfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n"
    + chunk(BODY)
    + b"0\r\n\r\n",
    "chunked in HTTP/1.0": HEAD.replace(b"1.1", b"1.0")
    + b"transfer-encoding: chunked\r\n\r\n"
    + chunk(BODY)
    + b"0\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    "no HTTP at all": b"hello\r\n\r\n",
}


@pytest.mark.parametrize("request_bytes", SMUGGLED.values(), ids=SMUGGLED.keys())
def test_a_request_that_two_readers_could_read_differently_is_a_400_and_the_end(
    raw: RawDeployment, request_bytes: bytes
) -> None:
    with raw.client() as client:
        answer = client.send(request_bytes).response()
        assert (answer.status, answer.json()["error"]["code"], answer.headers["connection"]) == (400, 400, "close")
        assert client.ended() == b""
    assert raw.engine.seen == []


def test_a_request_hidden_behind_a_refused_one_is_never_read(raw: RawDeployment) -> None:
    with raw.client() as client:
        client.send(SMUGGLED["two lengths"] + post(PATH, BODY))
        assert client.response().status == 400
        assert client.ended() == b""
    assert raw.engine.seen == []


@pytest.mark.parametrize(
    "beginning",
    [
        b"POST /",
        HEAD + b"x-",
        HEAD + b"x-long: ",
        HEAD + b"transfer-encoding: chunked\r\n\r\n10;",
        HEAD + b"transfer-encoding: chunked\r\n\r\n10\r\n" + BODY + b"\r\n0\r\nx-trailer: ",
    ],
    ids=["target", "name of a header", "value of a header", "extension of a chunk", "value of a trailer"],
)
def test_something_that_never_ends_is_a_431_soon(raw: RawDeployment, beginning: bytes) -> None:
    with raw.client() as client:
        client.send(beginning)
        client.flood(b"a" * 16_384, 16 * MEGABYTE)
        assert client.response().status == 431
    assert raw.engine.seen == []


@pytest.mark.parametrize("before", [b"", b"transfer-encoding: chunked\r\n\r\n10\r\n" + BODY + b"\r\n0\r\n"])
def test_ten_thousand_headers_are_a_431(raw: RawDeployment, before: bytes) -> None:
    headers = b"".join(b"x-%d: %d\r\n" % (index, index) for index in range(10_000))
    with raw.client() as client:
        client.send(HEAD + before)
        client.flood(headers, 16 * MEGABYTE)
        assert client.response().status == 431


def test_a_length_over_the_limit_is_refused_before_the_body_is_sent(raw: RawDeployment) -> None:
    with raw.client() as client:
        answer = client.send(HEAD + b"expect: 100-continue\r\ncontent-length: 3000000\r\n\r\n").response()
    assert (answer.status, answer.json()["error"]["code"]) == (413, 413)


def test_a_chunked_body_is_refused_once_it_is_too_large(raw: RawDeployment) -> None:
    with raw.client() as client:
        client.send(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        client.flood(chunk(b"x" * 65_536), 64 * MEGABYTE)
        assert client.response().status == 413
    assert raw.engine.seen == []


@pytest.mark.parametrize(
    "said",
    [b"POST /v1/comp", HEAD, HEAD + b"content-length: 16\r\n\r\n", HEAD + b"content-length: 16\r\n\r\n" + BODY[:5]],
    ids=["request line", "headers", "no body", "half a body"],
)
def test_a_request_that_stops_arriving_is_a_408(impatient: RawDeployment, said: bytes) -> None:
    with impatient.client() as client:
        answer = client.send(said).response()
        assert (answer.status, answer.json()["error"]["code"]) == (408, 408)
        assert client.ended() == b""


@pytest.mark.parametrize("said", [b"", b"\r\n\r\n", post(PATH, BODY)], ids=["nothing", "blank lines", "one request"])
def test_a_connection_without_a_request_is_closed(impatient: RawDeployment, said: bytes) -> None:
    with impatient.client() as client:
        client.send(said)
        if said.startswith(b"POST"):
            assert client.response().body == ANSWER
        assert client.ended() == b""


def test_a_second_request_that_stops_arriving_behind_the_first_is_not_waited_for_longer(
    impatient: RawDeployment,
) -> None:
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


def test_a_large_answer_does_not_make_a_connection_immortal(impatient: RawDeployment) -> None:
    """Its sender was held back for a while, and then let go: the limit for idle connections must still hold."""
    body = b'"' + b"x" * (4 * MEGABYTE) + b'"'
    impatient.engine.script = says(whole(body))
    with impatient.client(receive_buffer=4096) as client:
        assert client.send(post(PATH, BODY)).response().body == body
        assert client.ended() == b""


def test_a_client_that_does_not_read_its_answer_loses_its_connection_and_its_engine(impatient: RawDeployment) -> None:
    def endless(say: Say) -> None:
        say(STREAM_HEAD)
        while True:
            say(chunk(EVENT * 1000))

    impatient.engine.script = endless
    with impatient.client(receive_buffer=4096) as client:
        client.send(post(PATH, BODY))
        impatient.engine.wait(lambda engine: len(engine.seen) == 1)
        impatient.engine.wait_left()


def test_requests_of_a_client_that_reads_nothing_are_not_answered_into_our_memory(raw: RawDeployment) -> None:
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

        def slow(say: Say) -> None:
            # What closes an idle connection has had its turn at least once since then.
            idle.ended()
            with impatient.client() as another:
                another.ended()
            say(whole(ANSWER))

        impatient.engine.script = slow
        client.send(first)
        impatient.engine.wait(lambda engine: len(engine.seen) == 1)
        client.send(post(PATH, {"prompt": "second"}, *offer))
        impatient.engine.wait(lambda engine: engine.said > 0)
        assert client.response().body == ANSWER
        impatient.engine.script = says(whole(b'"second"'))
        assert client.response().status == 200


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("POST /health", 405),
        ("POST /ready", 405),
        ("POST /metrics", 405),
        ("GET /v1/models", 405),
        ("PUT /v1/completions", 405),
        ("POST /v1/nothing", 404),
    ],
)
def test_a_body_that_nobody_wants_is_refused_before_it_is_sent(
    raw: RawDeployment, request_line: str, status: int
) -> None:
    with raw.client() as client:
        client.send(f"{request_line} HTTP/1.1\r\nhost: proxy\r\ncontent-length: 1000000\r\n\r\n".encode())
        answer = client.response()
        assert (answer.status, answer.headers["connection"]) == (status, "close")


def test_bodies_behind_a_request_that_is_being_answered_stay_with_their_client(raw: RawDeployment) -> None:
    release = threading.Event()

    def held(say: Say) -> None:
        release.wait()
        say(whole(ANSWER))

    raw.engine.script = held
    large = post(PATH, b'{"prompt": "' + b"x" * (2 * MEGABYTE - 100) + b'"}')
    with raw.client() as client:
        before = raw.resident()
        client.send(post(PATH, BODY))
        raw.engine.wait(lambda engine: len(engine.seen) == 1)
        client.flood(large, 64 * MEGABYTE)
        assert raw.resident() - before < 6 * MEGABYTE
        release.set()
        assert client.response().body == ANSWER


def test_a_client_that_is_not_read_and_resets_its_connection_is_noticed_at_once(raw: RawDeployment) -> None:
    release = threading.Event()

    def held(say: Say) -> None:
        release.wait()
        say(whole(ANSWER))

    raw.engine.script = held
    client = raw.client().send(post(PATH, BODY) * 20)
    raw.engine.wait(lambda engine: len(engine.seen) == 1)
    client.reset()
    raw.proxy.until("cancelled 499")
    release.set()


def test_thousands_of_offered_upgrades_at_once_are_answered_one_after_the_other(raw: RawDeployment) -> None:
    request = post(PATH, b"{", "connection: Upgrade", "upgrade: h2c")
    count = 3000
    with raw.client() as client:
        sender = threading.Thread(target=client.send, args=[request * count])
        sender.start()
        assert {client.response().status for _ in range(count)} == {400}
        sender.join()


@pytest.fixture
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RawDeployment]:
    """One that may hold 5 MiB of requests, and an engine that answers when it is told to."""
    limits = {"max_buffered_bytes": 5 * MEGABYTE}
    with raw_deployment(tmp_path_factory.mktemp("tight"), limits=limits, max_body_bytes=2 * MEGABYTE) as raw:
        yield raw
        raw.unharmed()


def completion(size: int) -> bytes:
    return post(PATH, b'{"prompt": "%b"}' % (b"x" * size))


@pytest.mark.parametrize("waits", ["at its engine", "in a queue"])
def test_large_requests_beyond_the_budget_get_503_and_small_ones_are_served(
    tmp_path_factory: pytest.TempPathFactory, waits: str
) -> None:
    config: dict[str, Any] = {"limits": {"max_buffered_bytes": 5 * MEGABYTE}, "max_body_bytes": 2 * MEGABYTE}
    if waits == "in a queue":
        config["admission"] = {"aggregated": {"max_requests": 1, "queue_size": 100}}
    with raw_deployment(tmp_path_factory.mktemp("budget"), **config) as raw:
        release = threading.Event()

        def held(say: Say) -> None:
            release.wait()
            say(whole(ANSWER))

        raw.engine.script = held
        with raw.client() as first, raw.client() as second, raw.client() as small:
            first.send(post(PATH, BODY))
            raw.engine.wait(lambda engine: len(engine.seen) == 1)
            second.send(completion(2 * MEGABYTE - 100))
            if waits == "at its engine":
                raw.engine.wait(lambda engine: len(engine.seen) == 2)
            else:
                while not re.search(rb"queue_depth\{[^}]*\} 1", raw.ask(METRICS).body):
                    pass
            answer = raw.ask(completion(2 * MEGABYTE - 100))
            assert (answer.status, answer.headers["retry-after"], answer.json()["error"]["code"]) == (503, "1", 503)
            small.send(completion(10_000))
            release.set()
            assert [client.response().body for client in (first, second, small)] == [ANSWER] * 3
        assert raw.ask(completion(2 * MEGABYTE - 100)).status == 200
        raw.unharmed()


def test_requests_that_are_never_complete_or_never_answered_leave_the_budget_free(tight: RawDeployment) -> None:
    whole_request = completion(2 * MEGABYTE - 100)
    for piece in (whole_request[:MEGABYTE], whole_request, post("/v1/nothing", b"x" * MEGABYTE), whole_request + b"x"):
        for leave in ("close", "reset"):
            for _ in range(4):
                client = tight.client()
                with suppress(OSError):
                    client.send(piece)
                getattr(client, leave)()
    deadline = time.monotonic() + SECONDS
    while tight.ask(whole_request).status != 200:
        assert time.monotonic() < deadline


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "application/jsonp", ""])
def test_another_content_type_is_refused_in_vllms_words(raw: RawDeployment, content_type: str) -> None:
    answer = raw.ask(post(PATH, BODY, f"content-type: {content_type}"))
    assert (answer.status, answer.json()["error"]) == (
        400,
        {
            "message": "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed",
            "type": "Bad Request",
            "param": None,
            "code": 400,
        },
    )
    assert raw.engine.seen == []


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "Application/JSON", "application/json;"])
def test_json_is_json_however_it_is_called(raw: RawDeployment, content_type: str) -> None:
    assert raw.ask(post(PATH, BODY, f"content-type: {content_type}")).status == 200


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
def test_engines_get_utf_8_whatever_the_client_has_sent(raw: RawDeployment, encoding: str) -> None:
    text = '{"prompt": "hé 😀"}'
    assert raw.ask(post(PATH, text.encode(encoding))).status == 200
    assert raw.engine.seen[-1].body == text.encode()


def test_a_large_body_with_a_byte_order_mark_is_taken_and_in_utf_16_refused(raw: RawDeployment) -> None:
    text = '{"prompt": "' + "é" * 400_000 + '"}'
    assert raw.ask(post(PATH, text.encode("utf-8-sig"))).status == 200
    assert raw.engine.seen[-1].body == text.encode()
    assert raw.ask(post(PATH, text.encode("utf-16"))).status == 400


def test_a_large_list_of_tokens_takes_a_few_times_its_size_in_memory(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with raw_deployment(tmp_path_factory.mktemp("large"), split=True, max_body_bytes=64 * MEGABYTE) as raw:
        body = b'{"prompt": [' + b"1," * (12 * MEGABYTE) + b"1]}"
        before = raw.resident()
        # A scripted prefill gives no transfer parameters back: what counts is what both were sent.
        raw.ask(post(PATH, body))
        assert all(engine.seen[-1].body.startswith(b'{"prompt": [1,1,') for engine in raw.engines)
        assert raw.most_resident() - before < 4 * len(body)


def test_a_head_that_is_refused_gets_no_body(raw: RawDeployment) -> None:
    with raw.client() as client:
        answer = client.send(b"HEAD /v1/completions HTTP/1.1\r\n\r\n").response(head_only=True)
        assert (answer.status, client.ended()) == (400, b"")


def test_a_client_of_http_1_0_is_not_told_to_continue(raw: RawDeployment) -> None:
    with raw.client() as client:
        head = HEAD.replace(b"1.1", b"1.0") + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(BODY)
        assert client.send(head + BODY).response().status == 200


def test_requests_before_a_broken_one_are_answered(raw: RawDeployment) -> None:
    with raw.client() as client:
        client.send(post(PATH, {"prompt": "a"}) + post(PATH, {"prompt": "b"}) + b"broken\r\n\r\n")
        assert [client.response().body for _ in range(2)] == [ANSWER, ANSWER]
        assert client.ended() == b""
    assert [json.loads(seen.body)["prompt"] for seen in raw.engine.seen] == ["a", "b"]


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
@pytest.mark.parametrize("pause", [0, 100, -3], ids=["at once", "in the head", "in the body"])
def test_an_offered_upgrade_is_not_taken_and_the_request_counts(raw: RawDeployment, protocol: str, pause: int) -> None:
    """Java's client offers h2c with its first request."""
    request = post(PATH, BODY, "connection: Upgrade", f"upgrade: {protocol}")
    with raw.client() as client:
        for _ in range(2):
            answer = client.send(request[:pause], request[pause:]).response()
            assert (answer.status, answer.body) == (200, ANSWER)
    assert [seen.body for seen in raw.engine.seen] == [BODY, BODY]


def test_an_offered_upgrade_does_not_lift_a_limit(raw: RawDeployment) -> None:
    offer = b"connection: Upgrade\r\nupgrade: h2c\r\n"
    with raw.client() as client:
        client.send(HEAD + offer + b"transfer-encoding: chunked\r\n\r\n")
        client.flood(chunk(b"x" * 65_536), 64 * MEGABYTE)
        assert client.response().status == 413


@pytest.mark.parametrize("method", [b"CONNECT proxy:443", b"TRACE /", b"DELETE /v1/completions"])
def test_methods_of_others_are_refused(raw: RawDeployment, method: bytes) -> None:
    with raw.client() as client:
        assert client.send(method + b" HTTP/1.1\r\nhost: proxy\r\n\r\n").response().status in (404, 405)
    assert raw.engine.seen == []


@pytest.mark.parametrize(
    "target", ["http://127.0.0.1:1/v1/completions", "//v1/completions", "/v1/../v1/completions", "/v1/completions/"]
)
def test_only_the_path_itself_is_relayed(raw: RawDeployment, target: str) -> None:
    with raw.client() as client:
        assert client.send(post(target, BODY)).response().status == 404
    assert raw.engine.seen == []


def test_headers_that_claim_something_reach_no_engine(raw: RawDeployment) -> None:
    claims = [
        "x-forwarded-for: 10.0.0.1",
        "x-forwarded-host: evil",
        "x-forwarded-proto: https",
        "x-real-ip: 10.0.0.1",
        "forwarded: for=10.0.0.1",
        "via: 1.1 evil",
        "x-data-parallel-rank: 3",
        "X-Data-Parallel-Rank: 3",
        "x-prefill-host-port: evil:1",
        "proxy-authorization: Basic evil",
        "cookie: evil",
        "te: trailers",
        "connection: keep-alive, x-request-id",
        "transfer-id: evil",
    ]
    assert raw.ask(post(PATH, BODY, *claims)).status == 200
    (seen,) = raw.engine.seen
    assert {name for name, _ in seen.headers} == {
        "host",
        "content-type",
        "accept-encoding",
        "x-request-id",
        "authorization",
        "content-length",
    }
    assert "evil" not in str(seen.headers)


def test_headers_behind_the_body_count_for_nothing(raw: RawDeployment) -> None:
    trailers = b"authorization: Bearer evil\r\ntraceparent: evil\r\nx-session-id: evil\r\nx-request-id: evil\r\n"
    with raw.client() as client:
        client.send(HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk(BODY) + b"0\r\n" + trailers + b"\r\n")
        answer = client.response()
    assert (answer.status, answer.headers["x-request-id"] == "evil") == (200, False)
    assert "evil" not in str(raw.engine.seen[0].headers)


BROKEN: dict[str, bytes] = {
    "empty": b"",
    "half": b'{"prompt": "a"',
    "two": b'{"prompt": "a"}{"prompt": "b"}',
    "trailing": b'{"prompt": "a"} x',
    "comma": b'{"prompt": "a",}',
    "single quotes": b"{'prompt': 'a'}",
    "comment": b'{"prompt": "a" /* b */}',
    "two byte order marks": b'\xef\xbb\xbf\xef\xbb\xbf{"prompt": "a"}',
    "half of utf-16": '{"prompt": "a"}'.encode("utf-16")[:-1],
    "control character": b'{"prompt": "a\x00b"}',
    "infinity": b'{"prompt": "a", "temperature": Infinity}',
    "nested lists": b'{"prompt": ' + b"[" * 500_000 + b"]" * 500_000 + b"}",
    "nested objects": b'{"prompt": ' + b'{"a":' * 200_000 + b"1" + b"}" * 200_000 + b"}",
    "never closed": b'{"prompt": ' + b"[" * 1_000_000,
    "form": b"prompt=a&max_tokens=1",
    "many lists": b"[" * 1_000_000,
}


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("body", BROKEN.values(), ids=BROKEN.keys())
def test_a_body_that_is_no_json_object_is_a_400_in_the_apis_own_shape(
    raw: RawDeployment, path: str, body: bytes
) -> None:
    answer = raw.ask(post(path, body))
    assert answer.status == 400
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    if path == "/v1/messages":
        assert (answer.json()["type"], error["type"]) == ("error", "invalid_request_error")
    else:
        assert (error["type"], error["code"], error["param"]) == ("BadRequestError", 400, None)
    assert error["message"]
    assert raw.engine.seen == []


def test_clients_that_vanish_at_any_moment_leave_nothing_behind(raw: RawDeployment) -> None:
    """Closed or reset, after any number of bytes of the request or of the answer."""
    choose = random.Random(4)
    request = post(PATH, {"prompt": "x" * 2000, "stream": True})

    def stream(say: Say) -> None:
        say(STREAM_HEAD)
        for _ in range(50):
            say(chunk(EVENT * 20))
        say(b"0\r\n\r\n")

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


def test_clients_that_vanish_from_a_queue_leave_nothing_behind(tmp_path_factory: pytest.TempPathFactory) -> None:
    limits: dict[str, Any] = {"admission": {"aggregated": {"max_requests": 1, "queue_size": 100}}}
    with raw_deployment(tmp_path_factory.mktemp("queue"), **limits) as raw:
        release = threading.Event()

        def held(say: Say) -> None:
            release.wait()
            say(whole(ANSWER))

        raw.engine.script = held
        with raw.client() as first:
            first.send(post(PATH, BODY))
            raw.engine.wait(lambda engine: len(engine.seen) == 1)
            others = [raw.client().send(post(PATH, BODY)) for _ in range(20)]
            for other in others:
                other.close()
            for _ in others:
                raw.proxy.until("cancelled 499")
            release.set()
            assert first.response().body == ANSWER
        assert len(raw.engine.seen) == 1
        raw.unharmed()


def test_a_cut_script_is_a_cut_connection(raw: RawDeployment) -> None:
    """The control for what the other module says of engines: without an answer there is a 502."""

    def cut(_: Say) -> None:
        raise CutError

    raw.engine.script = cut
    assert raw.ask(post(PATH, BODY)).status == 502
