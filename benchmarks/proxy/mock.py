"""One process that is all engines: prefill workers, decode workers and Mooncake's bootstrap servers, each on its port.

    python -m benchmarks.proxy.mock          prints {"prefill": [port, ...], "decode": [...], "bootstrap": [...],
                                                     "events": [...]}

It speaks as much of vLLM as proxies ask for, computes nothing, and holds proxies to the contract: a decode leg gets
its first token when its own admission time is over AND the prefill leg of its transfer_id has ended, whichever came
first; a decode leg with another engine id than its prefill's is a 400, and so is a prefill leg of more than
one token. On the bootstrap ports: POST /mock/config (Settings as JSON), POST /mock/go (starts held
streams), POST /mock/finish (ends running ones), GET /mock/stats.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import httptools
import msgspec
import uvloop

from benchmarks.proxy.engine_messages import (
    ANSWER,
    DECODER,
    END,
    ENGINE_IDS,
    FRAME_AFTER,
    FRAME_BEFORE,
    METRICS,
    MODELS,
    QUERIES,
    SSE,
    Body,
    Settings,
)
from benchmarks.proxy.kv_events import Publisher
from benchmarks.proxy.wire import PAIRS


@dataclass
class Engines:
    """The state that the three ports share."""

    settings: Settings = field(default_factory=Settings)
    streams: set[Connection] = field(default_factory=set)
    prefilled: dict[str, int] = field(default_factory=dict)
    """Transfers whose prefill has ended and whose decode has not come, and the number of the prefill."""
    waiting: dict[str, Callable[[int], None]] = field(default_factory=dict)
    """Transfers whose decode waits for their prefill."""
    publishers: list[Publisher] = field(default_factory=lambda: [Publisher() for _ in range(PAIRS)])
    tokenized: set[bytes] = field(default_factory=set)
    """Bodies of which one prefill has told that it has them in its cache."""
    emitted: int = 0
    prefills: int = 0
    decodes: int = 0
    refused: int = 0
    why: str = ""
    """Of the last one."""
    ticking: bool = False
    due: float = 0.0

    def start(self, connection: Connection) -> None:
        self.streams.add(connection)
        if not self.settings.hold:
            self.go()

    def go(self) -> None:
        self.settings.hold = False
        if not self.ticking:
            self.ticking = True
            loop = asyncio.get_running_loop()
            self.due = loop.time() + self.settings.interval
            loop.call_at(self.due, self.step)

    def step(self) -> None:
        for stream in tuple(self.streams):
            stream.token()
        if not self.streams:
            self.ticking = False
            return
        loop = asyncio.get_running_loop()
        now = loop.time()
        # Late by a little: catch up step by step. Late by a lot: the machine cannot offer this rate, and a burst
        # afterwards would be a different load.
        self.due = max(self.due + self.settings.interval, now - 0.05)
        if self.due <= now:
            loop.call_soon(self.step)
        else:
            loop.call_at(self.due, self.step)

    def prefill_ended(self, transfer_id: str | None, number: int) -> None:
        if transfer_id is None:
            return
        resume = self.waiting.pop(transfer_id, None)
        if resume is None:
            self.prefilled[transfer_id] = number
        else:
            resume(number)

    def when_prefilled(self, transfer_id: str, resume: Callable[[int], None]) -> None:
        number = self.prefilled.pop(transfer_id, None)
        if number is None:
            self.waiting[transfer_id] = resume
        else:
            resume(number)

    def stats(self) -> bytes:
        names = ("emitted", "prefills", "decodes", "refused", "why")
        orphans = len(self.prefilled) + len(self.waiting)
        return json.dumps({name: getattr(self, name) for name in names} | {"orphans": orphans}).encode()


class Connection(asyncio.Protocol):
    """One client of one port."""

    def __init__(self, engines: Engines, role: str, number: int) -> None:
        self.engines, self.role, self.number = engines, role, number
        self.parser = httptools.HttpRequestParser(self)
        self.paused = False
        self.left = -1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self.fd: int = transport.get_extra_info("socket").fileno()

    def connection_lost(self, exc: Exception | None) -> None:
        self.engines.streams.discard(self)

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.engines.refused += 1
            self.engines.why = f"{self.role}-{self.number}: {error!r} in {data[:80]!r}"
            self.transport.abort()

    def on_message_begin(self) -> None:
        self.path = b""
        self.parts: list[bytes] = []

    def on_url(self, url: bytes) -> None:
        self.path += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"expect":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        self.parts.append(data)

    def on_message_complete(self) -> None:
        body = b"".join(self.parts)
        if self.path in (b"/v1/chat/completions", b"/v1/completions"):
            (self.prefill if self.role == "prefill" else self.decode)(DECODER.decode(body))
        else:
            self.reply(*self.other(body))

    def other(self, body: bytes) -> tuple[bytes, int]:
        """Everything that is no generation."""
        match self.path:
            case b"/health" | b"/ping":
                return b"{}", 200
            case b"/metrics":
                return METRICS, 200
            case b"/v1/models":
                return MODELS, 200
            case b"/query":
                return QUERIES[self.number], 200
            case b"/tokenize":
                # A token for every four bytes, as good as any for the cost of asking and hashing.
                tokens = list(body[::4])
                if body not in self.engines.tokenized:
                    self.engines.tokenized.add(body)
                    self.engines.publishers[len(self.engines.tokenized) % PAIRS].stored(tokens)
                return msgspec.json.encode({"count": len(tokens), "tokens": tokens}), 200
            case b"/mock/config":
                self.engines.settings = msgspec.json.decode(body, type=Settings)
                for publisher in self.engines.publishers:
                    publisher.again()
                return b"{}", 200
            case b"/mock/go":
                self.engines.go()
                return b"{}", 200
            case b"/mock/finish":
                for stream in self.engines.streams:
                    stream.left = 1
                return b"{}", 200
            case b"/mock/stats":
                return self.engines.stats(), 200
        return b'{"error":{"message":"no such path","type":"NotFound","param":null,"code":404}}', 404

    def refuse(self, why: str) -> None:
        self.engines.refused += 1
        self.engines.why = why
        self.reply(
            json.dumps({"error": {"message": why, "type": "BadRequest", "param": None, "code": 400}}).encode(), 400
        )

    def reply(self, body: bytes, status: int = 200) -> None:
        self.transport.write(
            b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(body))
            + body
        )

    def prefill(self, body: Body) -> None:
        self.engines.prefills += 1
        if body.max_tokens != 1 or body.stream:
            return self.refuse("a prefill leg is one token and no stream")
        transfer_id = body.kv_transfer_params.transfer_id if body.kv_transfer_params else None

        def end() -> None:
            self.engines.prefill_ended(transfer_id, self.number)
            self.reply(ANSWER)

        return self.after(self.engines.settings.prefill, end)

    def decode(self, body: Body) -> None:
        self.engines.decodes += 1
        transfer = body.kv_transfer_params
        answer = self.begin_stream if body.stream else self.answer
        admission = self.engines.settings.admission
        if transfer is None:
            return self.after(admission, answer)
        if not transfer.do_remote_prefill or transfer.transfer_id is None:
            return self.refuse("a decode leg needs do_remote_prefill and transfer_id")
        transfer_id, engine_id = transfer.transfer_id, transfer.remote_engine_id

        def prefilled(number: int) -> None:
            if engine_id == ENGINE_IDS[number]:
                answer()
            else:
                self.refuse("the prefill of this transfer has another engine id")

        return self.after(admission, lambda: self.engines.when_prefilled(transfer_id, prefilled))

    @staticmethod
    def after(seconds: float, then: Callable[[], None]) -> None:
        if seconds:
            asyncio.get_running_loop().call_later(seconds, then)
        else:
            then()

    def answer(self) -> None:
        self.reply(ANSWER)

    def begin_stream(self) -> None:
        if self.transport.is_closing():
            return
        self.engines.emitted += 1
        self.left = self.engines.settings.chunks - 1 if self.engines.settings.chunks else -1
        self.transport.write(SSE + FRAME_BEFORE + b"%019d" % time.monotonic_ns() + FRAME_AFTER)
        self.engines.start(self)

    def token(self) -> None:
        """One chunk, or the end. Straight to the socket: uvloop would send all chunks of a step after the last of
        them was stamped, and a delay of ours would be taken for the proxy's."""
        if self.paused:
            return
        if self.left == 0:
            self.engines.streams.discard(self)
            self.transport.write(END)
            return
        self.left -= 1
        self.engines.emitted += 1
        data = FRAME_BEFORE + b"%019d" % time.monotonic_ns() + FRAME_AFTER
        sent = 0
        if not self.transport.get_write_buffer_size():
            try:
                sent = os.write(self.fd, data)
            except BlockingIOError:
                pass
            except (BrokenPipeError, ConnectionResetError):
                self.engines.streams.discard(self)
                return
        if sent < len(data):
            self.transport.write(data[sent:])


async def serve() -> None:
    loop = asyncio.get_running_loop()
    engines = Engines()
    ports: dict[str, list[int]] = {"prefill": [], "decode": [], "bootstrap": []}
    for role, numbers in ports.items():
        for number in range(PAIRS):
            make = partial(Connection, engines, role, number)
            server = await loop.create_server(make, "127.0.0.1", 0, backlog=2048)
            numbers.append(server.sockets[0].getsockname()[1])
    ports["events"] = [publisher.port for publisher in engines.publishers]
    print(json.dumps(ports), flush=True)
    gc.freeze()
    gc.disable()
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve())
