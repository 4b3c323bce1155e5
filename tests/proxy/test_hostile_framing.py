"""Requests that are no HTTP, or two things at once: a clear answer or the end of their connection."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise

from tests.proxy.raw import ANSWER, BODY, HEAD, MEGABYTE, PATH, RawDeployment, chunk, post
from tests.tables import each_row

SMUGGLED = {
    "length and chunked": HEAD + b"content-length: 16\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked and length": HEAD + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": HEAD + b"content-length: 16\r\ncontent-length: 3\r\n\r\n" + BODY,
    "a list of lengths": HEAD + b"content-length: 16, 16\r\n\r\n" + BODY,
    "an unknown coding": HEAD + b"transfer-encoding: xchunked\r\n\r\n10\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunked not last": HEAD + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "a blank before the colon": HEAD + b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n",
    "one bare line feed": HEAD + b"traceparent: a\ncontent-length: 16\r\n\r\n" + BODY,
    "NUL in a value": HEAD + b"traceparent: a\x00b\r\ncontent-length: 16\r\n\r\n" + BODY,
    "a negative chunk": HEAD + b"transfer-encoding: chunked\r\n\r\n-10\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a version that there is not": b"POST /v1/completions HTTP/1.7\r\ncontent-length: 16\r\n\r\n" + BODY,
    "HTTP/0.9": b"GET /health\r\n\r\n",
    "no host": b"POST /v1/completions HTTP/1.1\r\ncontent-length: 16\r\n\r\n" + BODY,
    "two hosts": HEAD + b"host: other\r\ncontent-length: 16\r\n\r\n" + BODY,
    "compressed and chunked": HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n" + chunk(BODY) + b"0\r\n\r\n",
    "chunked in HTTP/1.0": HEAD.replace(b"1.1", b"1.0")
    + b"transfer-encoding: chunked\r\n\r\n"
    + chunk(BODY)
    + b"0\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    "no HTTP at all": b"hello\r\n\r\n",
}


@each_row("request_bytes", SMUGGLED.values())
def test_an_ambiguous_request_is_a_400_and_the_end(raw: RawDeployment, request_bytes: bytes) -> None:
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


CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
HEADERS = b"".join(b"x-%d: %d\r\n" % (index, index) for index in range(10_000))


@each_row(
    "beginning, more",
    [
        (b"POST /", b"a" * 16_384),
        (HEAD + b"x-", b"a" * 16_384),
        (HEAD + b"x-long: ", b"a" * 16_384),
        (HEAD, HEADERS),
        (CHUNKED + b"10;", b"a" * 16_384),
        (CHUNKED + b"10\r\n" + BODY + b"\r\n0\r\nx-trailer: ", b"a" * 16_384),
        (CHUNKED + b"10\r\n" + BODY + b"\r\n0\r\n", HEADERS),
    ],
)
def test_something_that_never_ends_is_a_431_soon(raw: RawDeployment, beginning: bytes, more: bytes) -> None:
    with raw.client() as client:
        client.send(beginning)
        client.flood(more, 16 * MEGABYTE)
        assert client.response().status == 431
    assert raw.engine.seen == []


def test_a_head_that_is_refused_gets_no_body(raw: RawDeployment) -> None:
    with raw.client() as client:
        answer = client.send(b"HEAD /v1/completions HTTP/1.1\r\n\r\n").response(head_only=True)
        assert (answer.status, client.ended()) == (400, b"")


def test_requests_before_a_broken_one_are_answered(raw: RawDeployment) -> None:
    with raw.client() as client:
        client.send(post(PATH, {"prompt": "a"}) + post(PATH, {"prompt": "b"}) + b"broken\r\n\r\n")
        assert [client.response().body for _ in range(2)] == [ANSWER, ANSWER]
        assert client.ended() == b""
    assert [json.loads(seen.body)["prompt"] for seen in raw.engine.seen] == ["a", "b"]


@each_row("protocol", ["h2c", "websocket"])
@each_row("pause", [0, 100, -3])
def test_an_offered_upgrade_is_not_taken_and_the_request_counts(raw: RawDeployment, protocol: str, pause: int) -> None:
    """Java's client offers h2c with its first request."""
    raw.engine.seen.clear()
    request = post(PATH, BODY, "connection: Upgrade", f"upgrade: {protocol}")
    with raw.client() as client:
        for _ in range(2):
            answer = client.send(request[:pause], request[pause:]).response()
            assert (answer.status, answer.body) == (200, ANSWER)
    assert [seen.body for seen in raw.engine.seen] == [BODY, BODY]


@each_row("method", [b"CONNECT proxy:443", b"TRACE /", b"DELETE /v1/completions"])
def test_methods_of_others_are_refused(raw: RawDeployment, method: bytes) -> None:
    with raw.client() as client:
        assert client.send(method + b" HTTP/1.1\r\nhost: proxy\r\n\r\n").response().status in (404, 405)
    assert raw.engine.seen == []


@each_row(
    "target",
    ["ftp://proxy/v1/completions", "//v1/completions", "/v1/../v1/completions", "/v1/completions/", "http://proxy"],
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


# --- bodies so long that most of one goes past the request parser (http.connection): where they end, and what follows


LONG = json.dumps({"prompt": "".join(f"line {number}\n" for number in range(60_000))}).encode()
CUTS: dict[str, Callable[[int], list[int]]] = {
    "at once": lambda size: [],
    "head apart": lambda size: [200],
    "little of the body first": lambda size: [1000],
    "small pieces": lambda size: list(range(1000, 61_000, 3000)),
    "all but the last byte": lambda size: [size - 1],
    "the beginning of the next one with its end": lambda size: [size - 1, size + 30],
}
"""Where two requests, of which the first has that size, are cut."""


@each_row("cuts", CUTS.values())
@each_row("headers", [(), ("connection: Upgrade", "upgrade: h2c")])
def test_it_arrives_whole_and_the_next_request_begins_behind_it(
    raw: RawDeployment, cuts: Callable[[int], list[int]], headers: tuple[str, ...]
) -> None:
    raw.engine.seen.clear()
    first, next_one = post(PATH, LONG, *headers), post(PATH, BODY)
    both, places = first + next_one, cuts(len(first))
    with raw.client() as client:
        client.send(*(both[begin:end] for begin, end in pairwise([0, *places, len(both)])))
        assert [client.response().body for _ in range(2)] == [ANSWER, ANSWER]
        assert client.send(first).response().status == 200
    assert [seen.body for seen in raw.engine.seen] == [LONG, BODY, LONG]


@each_row("headers, behind", [(["connection: close"], post(PATH, BODY)), ([], b"\x00\x00\r\n\r\n")])
def test_behind_the_last_request_of_a_connection_nothing_is_read(
    raw: RawDeployment, headers: list[str], behind: bytes
) -> None:
    raw.engine.seen.clear()
    with raw.client() as client:
        client.send(post(PATH, LONG, *headers) + behind)
        answer = client.response()
        assert answer.body == ANSWER
        assert not headers or answer.headers["connection"] == "close"
        assert client.ended() == b""
    assert [seen.body for seen in raw.engine.seen] == [LONG]
