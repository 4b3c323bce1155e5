"""Both ends of the proxy byte by byte: a client on a bare socket, and an engine that says exactly what it is told."""

from __future__ import annotations

import asyncio
import json
import re
import select
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.proxy.deployment import KEY, Proxy, proxy_config

SECONDS = 60.0
"""Longer than anything here takes: a test that waits so long has failed."""


@dataclass
class Response:
    """One response as it came over the wire."""

    status: int
    headers: dict[str, str]
    body: bytes
    complete: bool
    """It ended as its framing says."""

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[dict[str, Any]]:
        """The data of each event that is JSON."""
        data = [part.split(b"data: ", 1)[1] for part in self.body.split(b"\n\n") if b"data: " in part]
        return [json.loads(line) for line in data if line != b"[DONE]"]


class RawClient:
    """One connection to the proxy."""

    def __init__(self, port: int, *, receive_buffer: int | None = None, address: str = "127.0.0.1") -> None:
        """`address`: the client's own."""
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(SECONDS)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.bind((address, 0))
        self.socket.connect(("127.0.0.1", port))
        self._buffer = b""

    def send(self, *pieces: bytes) -> Self:
        for piece in pieces:
            self.socket.sendall(piece)
        return self

    def flood(self, piece: bytes, limit: int) -> int:
        """Sends until the proxy says something or takes no more; how many bytes it took. AssertionError: all."""
        sent = 0
        self.socket.settimeout(2)
        with suppress(OSError):
            while sent < limit and not select.select([self.socket], [], [], 0)[0]:
                self.socket.sendall(piece)
                sent += len(piece)
        self.socket.settimeout(SECONDS)
        assert sent < limit, f"the proxy took {sent} bytes"
        return sent

    def response(self, *, head_only: bool = False) -> Response:
        """The next one. AssertionError: the connection ended without one."""
        head = self._until(b"\r\n\r\n")
        assert head is not None, f"no response, only {self._buffer!r}"
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines if line)}
        status = int(first.split(" ")[1])
        if status == 100:
            return self.response(head_only=head_only)
        complete, body = (True, b"") if head_only or status == 204 else self._body(headers)
        return Response(status, headers, body, complete)

    def until(self, mark: bytes) -> bytes:
        """Everything before it. AssertionError: the connection ended first."""
        data = self._until(mark)
        assert data is not None, f"ended before {mark!r}, after {self._buffer!r}"
        return data

    def ended(self) -> bytes:
        """Everything until the connection ends; b"" when nothing comes."""
        with suppress(ConnectionResetError):
            while self._more():
                pass
        data, self._buffer = self._buffer, b""
        return data

    def close(self) -> None:
        self.socket.close()

    def reset(self) -> None:
        """Leaves with a RST, as a killed client with unread data does."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        self.socket.close()

    def _body(self, headers: dict[str, str]) -> tuple[bool, bytes]:
        if (length := headers.get("content-length")) is not None:
            return self._take(int(length))
        if headers.get("transfer-encoding") != "chunked":
            return True, self.ended()
        parts: list[bytes] = []
        while (line := self._until(b"\r\n")) is not None:
            size = int(line, 16)
            whole, data = self._take(size + 2)
            if not whole:
                break
            assert data.endswith(b"\r\n")
            if size == 0:
                return True, b"".join(parts)
            parts.append(data[:-2])
        return False, b"".join(parts)

    def _until(self, mark: bytes) -> bytes | None:
        while mark not in self._buffer:
            if not self._more():
                return None
        data, self._buffer = self._buffer.split(mark, 1)
        return data

    def _take(self, size: int) -> tuple[bool, bytes]:
        while len(self._buffer) < size and self._more():
            pass
        data, self._buffer = self._buffer[:size], self._buffer[size:]
        return len(data) == size, data

    def _more(self) -> bool:
        try:
            data = self.socket.recv(1 << 18)
        except ConnectionResetError:
            return False
        self._buffer += data
        return bool(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def post(path: str, body: bytes | dict[str, Any], *headers: str, version: str = "1.1") -> bytes:
    """A request of a client."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/{version}", "host: proxy", f"content-length: {len(data)}", *headers]
    if not any(header.lower().startswith("content-type:") for header in headers):
        lines.append("content-type: application/json")
    lines += ["", ""]
    return "\r\n".join(lines).encode("latin-1") + data


@dataclass
class Seen:
    """A request that an engine has got."""

    line: str
    headers: list[tuple[str, str]]
    body: bytes


class CutError(Exception):
    """A script ends the connection here."""


Send = Callable[[bytes], None]
Script = Callable[[Send], None]
"""Writes the answer to one request. The connection is kept afterwards, unless it raises CutError."""


def sends(*pieces: bytes, cut: bool = False) -> Script:
    """Each piece with a write of its own; `cut`: then the connection ends."""

    def script(send: Send) -> None:
        for piece in pieces:
            send(piece)
        if cut:
            raise CutError

    return script


def head(
    content_type: str = "application/json", length: int | None = None, *more: str, status: str = "200 OK"
) -> bytes:
    """The head of an engine's answer; chunked without a length."""
    framing = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    return "\r\n".join([f"HTTP/1.1 {status}", f"content-type: {content_type}", framing, *more, "", ""]).encode()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


def whole(body: bytes, content_type: str = "application/json") -> bytes:
    return head(content_type, len(body)) + body


HEALTH = b"GET /health HTTP/1.1\r\nhost: proxy\r\n\r\n"
METRICS = b"GET /metrics HTTP/1.1\r\nhost: proxy\r\n\r\n"
PATH = "/v1/completions"
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: proxy\r\ncontent-type: application/json\r\n"
BODY = b'{"prompt": "hi"}'
SSE = "text/event-stream; charset=utf-8"
STREAM_HEAD = head(SSE)
EVENT = b'data: {"choices": [{"text": "a"}]}\n\n'
DONE = b"data: [DONE]\n\n"
MEGABYTE = 1 << 20
ANSWER = json.dumps(
    {
        "id": "cmpl-1",
        "choices": [{"index": 0, "text": "hi", "finish_reason": "length"}],
        "usage": {"prompt_tokens": 2, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}},
    }
).encode()


@dataclass
class RawEngine:
    """Speaks HTTP only as its script says; health, metrics and engine ids it answers like an engine."""

    script: Script = field(default_factory=lambda: sends(whole(ANSWER)))
    seen: list[Seen] = field(default_factory=list)
    sent: int = 0
    """Bytes that the network took from it in answers, ever."""
    busy: int = 0
    """Requests that are being answered."""
    tls: ssl.SSLContext | None = None

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port = int(self._listener.getsockname()[1])
        self.url = f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"
        self._open: set[socket.socket] = set()
        self._changed = threading.Condition()
        threading.Thread(target=self._accept, daemon=True).start()

    def wait(self, condition: Callable[[RawEngine], bool]) -> None:
        """Wait until it holds."""
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self), SECONDS), (
                f"waited in vain; busy: {self.busy}, seen: {len(self.seen)}"
            )

    def wait_left(self) -> None:
        """Wait until no request is being answered any more."""
        self.wait(lambda engine: engine.busy == 0)

    def close(self) -> None:
        self._listener.close()
        for connection in list(self._open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._changed:
                    self._open.add(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        def send(data: bytes) -> None:
            connection.sendall(data)
            with self._changed:
                self.sent += len(data)
                self._changed.notify_all()

        try:
            if self.tls is not None:
                connection = self.tls.wrap_socket(connection, server_side=True)
            reader = connection.makefile("rb")
            while (line := reader.readline().decode("latin-1").rstrip()) != "":
                headers = []
                while (header := reader.readline().decode("latin-1").rstrip("\r\n")) != "":
                    name, _, value = header.partition(": ")
                    headers.append((name, value))
                body = reader.read(int(dict(headers).get("content-length", "0")))
                if line.startswith("POST "):
                    with self._changed:
                        self.seen.append(Seen(line, headers, body))
                        self.busy += 1
                        self._changed.notify_all()
                    try:
                        self.script(send)
                    finally:
                        with self._changed:
                            self.busy -= 1
                            self._changed.notify_all()
                elif line.startswith("GET /query "):
                    send(whole(b'{"0": {"engine_id": "one", "worker_addr": {"0": {"0": "tcp://127.0.0.1:1"}}}}'))
                else:
                    send(whole(b""))
        except (CutError, OSError):
            pass
        finally:
            # Without a reader left, closing is really closing.
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
            with self._changed:
                self._open.discard(connection)
                self._changed.notify_all()


class RawDeployment:
    """The real proxy in front of scripted engines."""

    def __init__(self, proxy: Proxy, engines: Sequence[RawEngine]) -> None:
        self.proxy = proxy
        self.engines = engines

    @property
    def engine(self) -> RawEngine:
        """The one that answers clients."""
        return self.engines[-1]

    def client(self, *, receive_buffer: int | None = None, address: str = "127.0.0.1") -> RawClient:
        return RawClient(self.proxy.port, receive_buffer=receive_buffer, address=address)

    def ask(self, request: bytes) -> Response:
        with self.client() as client:
            return client.send(request).response()

    def hold(self) -> threading.Event:
        """The engine answers once this is set."""
        release = threading.Event()

        def held(send: Send) -> None:
            release.wait()
            send(whole(ANSWER))

        self.engine.script = held
        return release

    def resident(self) -> int:
        """Bytes of memory that the proxy has."""
        return self.proxy.memory("VmRSS")

    def unharmed(self) -> None:
        """It still serves, and soon nothing of what was before is left: no leg in flight, nobody in a queue."""
        for engine in self.engines:
            engine.script = sends(whole(ANSWER))
        answer = self.ask(post("/v1/completions", {"prompt": "still there?"}))
        assert (answer.status, answer.body) == (200, ANSWER)
        deadline = time.monotonic() + SECONDS
        while left := self._left():
            assert time.monotonic() < deadline, left

    def _left(self) -> list[str]:
        """Return the numbers of what is under way. The proxy may still be about to notice that a client has gone."""
        workers = self.ask(b"GET /workers HTTP/1.1\r\nhost: proxy\r\n\r\n").json()["workers"]
        page = self.ask(METRICS).body.decode()
        counted = r"^(pdserve_proxy_(?:queue_depth|pool_requests|prompt_tokens_in_flight)\{.*) ([1-9].*)$"
        return [worker["name"] for worker in workers if worker["in_flight"]] + [
            f"{name} {value}" for name, value in re.findall(counted, page, re.M)
        ]


@contextmanager
def raw_deployment(
    folder: Path, *, split: bool = False, moments: Mapping[str, float] | None = None, **config: Any
) -> Iterator[RawDeployment]:
    """The proxy in front of one scripted engine that does both, or (`split`) of a prefill and a decode.

    `moments`: as Proxy has them. `config`: fields of ProxyConfig."""
    roles = ("prefill", "decode") if split else ("aggregated",)
    engines = [RawEngine() for _ in roles]
    workers = [
        {"name": f"{role}-0", "role": role, "url": engine.url, "bootstrap_url": engine.url}
        for role, engine in zip(roles, engines, strict=True)
    ]
    # Engines fail on purpose here: no breaker is to open because of that.
    values: dict[str, Any] = {"drain_seconds": 5, "max_body_bytes": 16_000_000, "breaker": {"failures": 1_000_000}}
    values |= {"protocol": "mooncake" if split else "aggregated", "workers": workers}
    wanted = proxy_config(**values | config)
    proxy = Proxy(folder / "raw.json", wanted, key=KEY, control=False, moments=moments)
    try:
        proxy.ready()
        yield RawDeployment(proxy, engines)
    finally:
        proxy.end()
        for engine in engines:
            engine.close()


def lent(raw: RawDeployment) -> Iterator[RawDeployment]:
    """Give a deployment of a module to one of its tests: whatever that has done to it, it must serve on."""
    for engine in raw.engines:
        engine.seen.clear()
    yield raw
    raw.unharmed()


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def listening(serve: Serve) -> AsyncIterator[str]:
    """Serve connections in this loop, and give the URL. At its end all that were accepted are over."""
    served: set[asyncio.Task[None]] = set()

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        served.add(task)
        task.add_done_callback(served.discard)
        with suppress(ConnectionResetError):
            await serve(reader, writer)
        writer.close()

    server = await asyncio.start_server(accepted, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        while served:
            await asyncio.wait(served)
        await server.wait_closed()
