"""Connections of the load generator and what they record."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle
from typing import TypeVar, cast

import httptools

from benchmarks.proxy.wire import STAMP, STAMP_DIGITS

STAMPED = re.compile(rb"%s(\d{%d})" % (STAMP, STAMP_DIGITS))
EVENT_END = b"\n\n"
PATIENCE = 60.0
C = TypeVar("C", bound="Connection")


class LoadError(Exception):
    """This measurement says nothing: the system failed under it."""


@dataclass(frozen=True)
class Address:
    host: str
    port: int


class Connection(asyncio.Protocol):
    """A keep-alive connection with at most one request under way."""

    def __init__(self, lost: Callable[[LoadError], None]) -> None:
        self._lost = lost
        self.parser = httptools.HttpResponseParser(self)
        self.sent = 0
        self.waiting = False
        """For an answer: only then is a closed connection a failure. Idle ones may be closed at any time."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def connection_lost(self, exc: Exception | None) -> None:
        if self.waiting:
            self._lost(LoadError(f"a connection was closed by the other side ({exc or 'no reason given'})"))

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.waiting = False
            self.transport.abort()
            self._lost(LoadError(f"the answer is no HTTP: {error}"))

    def send(self, request: bytes) -> None:
        self.waiting = True
        self.sent = time.monotonic_ns()
        self.transport.write(request)

    def close(self) -> None:
        self.waiting = False
        self.transport.close()


@dataclass
class Run:
    """What the connections of one measurement share."""

    recording: bool = False
    done: int = 0
    """Requests answered while recording, whatever the answer."""
    refused: int = 0
    """Answers other than 200, recording or not."""
    times: list[int] = field(default_factory=list)
    """ns: latencies, times to the first byte or delays of chunks."""
    stop: bool = False
    failed: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def fail(self, error: LoadError) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)

    async def sleep(self, seconds: float) -> None:
        """LoadError as soon as a connection has failed."""
        await asyncio.wait([self.failed], timeout=seconds)
        if self.failed.done():
            self.failed.result()

    async def until(self, reached: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not reached():
            if time.monotonic() > deadline:
                raise LoadError(f"{what}: not within {PATIENCE:.0f} s")
            await self.sleep(0.005)

    def close(self) -> None:
        if self.failed.done():
            self.failed.exception()  # looked at: asyncio would warn about it
        else:
            self.failed.cancel()

    def quantile_ms(self, share: float) -> float:
        if not self.times:
            raise LoadError("nothing was answered")
        ordered = sorted(self.times)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] / 1e6


async def connect(address: Address, make: Callable[[], C]) -> C:
    try:
        _, connection = await asyncio.get_running_loop().create_connection(make, address.host, address.port)
    except OSError as error:
        raise LoadError(f"cannot connect: {error}") from error
    return connection


class Repeating(Connection):
    """Sends the next request as soon as the last one is answered."""

    def __init__(self, run: Run, requests: cycle[bytes]) -> None:
        super().__init__(run.fail)
        self.run, self.requests = run, requests

    def on_message_complete(self) -> None:
        run = self.run
        if self.parser.get_status_code() != 200:
            run.refused += 1
        if run.recording:
            run.done += 1
            run.times.append(time.monotonic_ns() - self.sent)
        if run.stop:
            self.waiting = False
        else:
            self.send(next(self.requests))


class Streaming(Connection):
    """One stream of stamped chunks."""

    def __init__(self, run: Run) -> None:
        super().__init__(run.fail)
        self.run = run
        self.chunks = self.reads = 0
        self.tail = b""
        self.began = self.ended = False

    def on_message_begin(self) -> None:
        self.began = self.ended = False

    def on_body(self, data: bytes) -> None:
        now = time.monotonic_ns()
        if self.tail:
            data = self.tail + data
        if data.endswith(EVENT_END):
            self.tail = b""
        else:
            cut = data.rfind(EVENT_END) + len(EVENT_END) if EVENT_END in data else 0
            data, self.tail = data[:cut], data[cut:]
        stamps = STAMPED.findall(data)
        self.chunks += len(stamps)
        self.began = True
        run = self.run
        if run.recording:
            run.done += len(stamps)
            self.reads += 1
            for stamp in stamps:
                run.times.append(now - int(stamp))

    def on_message_complete(self) -> None:
        if self.parser.get_status_code() != 200:
            self.run.refused += 1
        self.ended = True
        self.waiting = False


class FirstByte(Streaming):
    """Records the time to the first byte of the body instead of the delays of chunks; ends in `free`."""

    def __init__(self, run: Run, free: list[FirstByte]) -> None:
        super().__init__(run)
        self._free = free

    def on_body(self, data: bytes) -> None:
        if not self.began:
            self.began = True
            if self.run.recording:
                self.run.done += 1
                self.run.times.append(time.monotonic_ns() - self.sent)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._free.append(self)
