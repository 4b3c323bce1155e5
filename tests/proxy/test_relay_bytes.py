"""What an engine says reaches the client byte for byte, however it is cut on its way and however slowly it is read.

But for one thing: how many tokens of the prompt were cached, which only prefill knows.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import httptools
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.pd.config.proxy import WorkerConfig
from pdserve.pd.errors import ApiError
from pdserve.pd.http.connection import Connection
from pdserve.pd.http.front import ClientLimits, Front, Request
from pdserve.pd.http.reply import HttpReply
from pdserve.pd.http.upstream import UpstreamConnection as Upstream
from pdserve.pd.relay.client import Client
from pdserve.pd.relay.leg import Leg, ignore_poke
from pdserve.pd.requests.dialects import CHAT, MESSAGES
from tests.proxy.deployment import registry_of
from tests.proxy.raw import (
    DONE,
    HEALTH,
    MEGABYTE,
    SSE,
    RawDeployment,
    Send,
    chunk,
    head,
    post,
    raw_deployment,
    sends,
    whole,
)

PATH = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": []}
WORKER = WorkerConfig(name="one", role="aggregated", url="http://127.0.0.1:1")

TEXT = st.text(max_size=20).map(lambda text: json.dumps({"choices": [{"delta": {"content": text}}]}).encode())
RAW_TEXT = st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=20).map(str.encode)
DATA = st.one_of(TEXT, RAW_TEXT)
EVENT = st.one_of(
    DATA.map(lambda data: b"data: " + data),
    DATA.map(lambda data: b"event: message\ndata:" + data),
    st.lists(DATA, min_size=2, max_size=3).map(lambda lines: b"\n".join(b"data: " + line for line in lines)),
    st.sampled_from([b": keep-alive", b":", b"id: 7\nretry: 10", b"data: " + b"x" * 3000]),
)
EVENTS = st.lists(EVENT, max_size=6)


def joined(events: Sequence[bytes], end: bytes) -> bytes:
    """A stream whose first event is one of an engine, and whose last says that it is complete."""
    lines = [event.replace(b"\n", end) for event in (b'data: {"choices": []}', *events, b"data: [DONE]")]
    return b"".join(line + end + end for line in lines)


STREAMS = st.builds(joined, EVENTS, st.sampled_from([b"\n", b"\r\n"]))


def cut(data: bytes, at: Sequence[int]) -> list[bytes]:
    """`data` in pieces; places beyond its end count from its beginning again."""
    places = sorted({0, len(data), *(place % (len(data) + 1) for place in at)})
    return [data[begin:end] for begin, end in pairwise(places)]


CUTS = st.lists(st.integers(0, 10_000), max_size=12)


class Wire(asyncio.Transport):
    """The outer end of a connection: keeps what is sent, never is in the way."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += bytes(data)

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def can_write_eof(self) -> bool:
        return False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """There is no buffer."""

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        """Pieces come when the test says so."""

    resume_reading = pause_reading


class Received:
    """What a client makes of the bytes that it gets: a library's parser."""

    def __init__(self, data: bytes) -> None:
        self.body = b""
        self.complete = False
        self._parser = httptools.HttpResponseParser(self)
        self._parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.complete = True


class NoHandler:
    """Requests do not come over the wire here."""

    def refuse(self, request: Request) -> ApiError | None:
        raise NotImplementedError

    def handle(self, request: Request, reply: HttpReply) -> None:
        raise NotImplementedError

    def failed(self, request: Request | None, reply: HttpReply, error: ApiError) -> None:
        raise NotImplementedError


async def relayed(pieces: Sequence[bytes], *, http10: bool = False, cached: int | None = None) -> Received:
    """Each piece is what one read from the engine gives; everything between the two wires is the proxy's own."""
    worker = registry_of("aggregated", WORKER).workers["one"]
    upstream, inside, outside = Upstream(worker.pool), Wire(), Wire()
    upstream.connection_made(inside)
    worker.pool.keep(upstream)
    front = Connection(Front(NoHandler(), ClientLimits()))
    front.connection_made(outside)
    reply = HttpReply(front, keep_alive=True, head_only=False, http10=http10)
    client = Client(reply, "id", CHAT)
    client.cached_tokens = cached
    leg = Leg(worker, b"", b"", ignore_poke)
    relaying = False
    for piece in pieces:
        upstream.data_received(piece)
        if not relaying and leg.settled:
            leg.result()
            client.relay(leg)
            relaying = True
    received = Received(outside.sent)
    if http10:
        assert outside.closed
        received.complete = True
    return received


@settings(max_examples=settings().max_examples * 3, deadline=None)
@given(STREAMS, CUTS, CUTS, st.booleans(), st.booleans())
def test_a_stream_is_the_same_however_it_is_cut(
    stream: bytes, chunks: list[int], reads: list[int], http10: bool, size: bool
) -> None:
    chunked = head(SSE) + b"".join(chunk(part) for part in cut(stream, chunks)) + b"0\r\n\r\n"
    wire = whole(stream, SSE) if size else chunked
    received = asyncio.run(relayed(cut(wire, reads), http10=http10))
    assert (received.body, received.complete) == (stream, True)


@settings(deadline=None)
@given(st.binary(max_size=3000), CUTS, CUTS, st.booleans())
def test_an_answer_is_the_same_however_it_is_cut(body: bytes, chunks: list[int], reads: list[int], size: bool) -> None:
    wire = whole(body) if size else head() + b"".join(chunk(part) for part in cut(body, chunks)) + b"0\r\n\r\n"
    received = asyncio.run(relayed(cut(wire, reads)))
    assert (received.body, received.complete) == (body, True)


def usage(count: int) -> bytes:
    details = {"prompt_tokens_details": {"cached_tokens": count}}
    words = 'a model may say "cached_tokens": 5, and {"cached_tokens": 5}'
    return json.dumps({"choices": [{"message": words}], "usage": details}).encode()


@settings(max_examples=settings().max_examples * 2, deadline=None)
@given(st.integers(0, 10**7), st.integers(0, 10**7), CUTS, CUTS, st.booleans())
def test_only_the_number_of_cached_tokens_changes(
    reported: int, cached: int, chunks: list[int], reads: list[int], stream: bool
) -> None:
    def body(tokens: int) -> bytes:
        return b"data: " + usage(tokens) + b"\n\n" + DONE if stream else usage(tokens)

    parts = b"".join(chunk(part) for part in cut(body(reported), chunks))
    wire = head(SSE if stream else "application/json") + parts + b"0\r\n\r\n"
    received = asyncio.run(relayed(cut(wire, reads), cached=cached))
    assert (received.body, received.complete) == (body(cached), True)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**7), st.integers(0, 10**7), st.lists(st.integers(0, 700), max_size=8), st.integers(0, 600))
def test_only_cached_tokens_change_in_a_long_answer(reported: int, cached: int, from_end: list[int], more: int) -> None:
    def body(tokens: int) -> bytes:
        return usage(tokens)[:-1] + b', "more": "' + b"x" * more + b'", "long": "' + b"x" * MEGABYTE + b'"}'

    def turned(tokens: int) -> bytes:
        return b'{"long": "' + b"x" * MEGABYTE + b'", ' + usage(tokens)[1:-1] + b', "more": "' + b"x" * more + b'"}'

    for make in (body, turned):
        wire = whole(make(reported))
        places = [len(wire) - place for place in from_end] + [len(wire) // 2, len(wire) - more - 300]
        received = asyncio.run(relayed(cut(wire, places), cached=cached))
        # Its length is another one: the answer is chunked.
        assert (received.body, received.complete) == (make(cached), True)


def test_pipelined_requests_are_answered_in_their_order(raw: RawDeployment) -> None:
    """More than are taken at once, some relayed and some not."""

    def echo(send: Send) -> None:
        send(whole(raw.engine.seen[-1].body))

    raw.engine.script = echo
    bodies = [json.dumps({"messages": [], "n": index}).encode() for index in range(50)]
    with raw.client() as client:
        client.send(b"".join(post(PATH, body) + HEALTH for body in bodies))
        for body in bodies:
            assert client.response().body == body
            assert client.response().json()["status"] == "alive"


@pytest.mark.parametrize("header", ["connection: close", "connection: keep-alive"])
def test_an_http_1_0_client_gets_its_answer_unchunked(raw: RawDeployment, header: str) -> None:
    with raw.client() as client:
        first = client.send(post(PATH, BODY, header, version="1.0")).response()
        assert (first.status, "transfer-encoding" in first.headers) == (200, False)
        if header.endswith("close"):
            assert client.ended() == b""
        else:
            assert client.send(post(PATH, BODY, header, version="1.0")).response().body == first.body


def test_a_slow_reader_slows_its_engine_down_and_not_our_memory(raw: RawDeployment) -> None:
    """256 MiB are said as fast as they are taken; the client reads none of them until nothing more is taken."""
    event = b"data: " + b"x" * 65_000 + b"\n\n"
    total = 4000
    before = raw.resident()

    def script(send: Send) -> None:
        send(head(SSE))
        for _ in range(total):
            send(chunk(event))
        send(chunk(DONE) + b"0\r\n\r\n")

    raw.engine.script = script
    sent_before = raw.engine.sent
    with raw.client(receive_buffer=65_536) as client:
        client.send(post(PATH, BODY))
        raw.engine.wait(lambda engine: engine.sent - sent_before > MEGABYTE)
        # Others are served meanwhile, and the stuck stream moves no more between two of them.
        taken = -1
        while taken != raw.engine.sent:
            taken = raw.engine.sent
            for _ in range(20):
                assert raw.ask(HEALTH).status == 200
        assert taken - sent_before < 64 * MEGABYTE
        assert raw.resident() - before < 32 * MEGABYTE
        answer = client.response()
    assert len(answer.body) == total * len(event) + len(DONE)
    assert answer.body.endswith(DONE)
    assert raw.resident() - before < 32 * MEGABYTE


def test_two_legs_change_only_the_number_of_cached_tokens(tmp_path_factory: pytest.TempPathFactory) -> None:
    with raw_deployment(tmp_path_factory.mktemp("split"), split=True) as raw:
        prefill, decode = raw.engines
        cached = b'{"prompt_tokens_details": {"cached_tokens": 3}}'
        finished = b'{"choices": [{"finish_reason": "length"}], "usage": ' + cached + b"}"
        prefill.script = sends(whole(finished))
        stream = b'data: {"a": 1.10}\n\ndata: ' + usage(99) + b"\n\n" + DONE
        decode.script = sends(head(SSE), *(chunk(part) for part in cut(stream, range(0, 1000, 7))), b"0\r\n\r\n")
        expected = re.sub(rb'("cached_tokens": )99', rb"\g<1>3", stream)
        assert raw.ask(post(PATH, BODY)).body == expected
        # Anthropic's input_tokens are those that were not cached: their sum is the prompt.
        prefill.script = sends(whole(b'{"usage": {"input_tokens": 68, "cache_read_input_tokens": 32}}'))
        decode.script = sends(whole(json.dumps(MESSAGE).encode()))
        answer = raw.ask(post(MESSAGES.path, {"messages": [], "max_tokens": 4}))
        counted = {"input_tokens": 68, "output_tokens": 4, "cache_read_input_tokens": 32}
        assert answer.body == json.dumps(MESSAGE | {"usage": counted}).encode()
        raw.unharmed()


MESSAGE = {
    "content": [{"type": "text", "text": '"usage": {"input_tokens": 1, "cache_read_input_tokens": 1}'}],
    "usage": {"input_tokens": 1, "output_tokens": 4, "cache_read_input_tokens": 99},
}
