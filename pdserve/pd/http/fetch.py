"""One small request whose whole answer is wanted: health, engine ids, models."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from pdserve.pd.http.connecting import lacks_descriptors
from pdserve.pd.http.upstream import Pool, UpstreamConnection

_MAX_BYTES = 16 * 1024 * 1024


class FetchError(Exception):
    """No complete answer: not reachable, cut, too late or too long. `ours`: this process has no descriptor left, which
    is no fault of the worker that was asked."""

    def __init__(self, what: str, *, ours: bool = False) -> None:
        super().__init__(what)
        self.ours = ours


@dataclass(frozen=True)
class Answer:
    status: int
    content_type: str
    body: bytes


class _WholeBody:
    """The sink that collects an answer."""

    def __init__(self) -> None:
        self.done: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._status = 0
        self._content_type = ""
        self._data = bytearray()

    def on_status(self, status: int, content_type: str) -> None:
        self._status, self._content_type = status, content_type

    def on_data(self, data: bytes) -> None:
        self._data += data
        if len(self._data) > _MAX_BYTES and not self.done.done():
            self.done.set_exception(FetchError("the answer is too long"))

    def on_end(self) -> None:
        if not self.done.done():
            self.done.set_result(Answer(self._status, self._content_type, bytes(self._data)))

    def on_sent(self) -> None:
        """Of no interest here."""

    def on_lost(self) -> None:
        if not self.done.done():
            self.done.set_exception(FetchError("the connection was closed"))


async def fetch(
    pool: Pool,
    method: str,
    path: str,
    *,
    headers: bytes = b"",
    body: bytes = b"",
    timeout: float = 5.0,
    reuse: bool = False,
) -> Answer:
    """`headers`: complete lines, each with its end. `reuse`: an open connection will do; by default a new one is made,
    because rare requests find old ones, which may just be closing. Raises FetchError."""
    length = b"content-length: %d\r\n" % len(body) if body or method == "POST" else b""
    head = b"%b %b HTTP/1.1\r\nhost: %b\r\n%b%b\r\n" % (
        method.encode(),
        path.encode(),
        pool.host_header,
        headers,
        length,
    )
    connection: UpstreamConnection | None = None
    sink = _WholeBody()
    try:
        async with asyncio.timeout(timeout):
            connection = (pool.take() if reuse else None) or await pool.connect()
            connection.send(head, body, sink)
            return await sink.done
    except TimeoutError:
        raise FetchError(f"no answer within {timeout:g} s") from None
    except OSError as error:
        what = f"cannot be reached: {error.strerror or type(error).__name__}"
        raise FetchError(what, ours=lacks_descriptors(error)) from error
    finally:
        complete = sink.done.done() and not sink.done.cancelled() and sink.done.exception() is None
        if connection is not None and not complete:
            connection.abort()
