"""The sink of an answer that is wanted as a whole."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from pdserve.pd.http.upstream import Sink

_MAX_BYTES: Final = 16 * 1024 * 1024


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


class WholeAnswer(Sink):
    """`done` has the answer, or raises FetchError."""

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
        """Do nothing: the answer alone is awaited."""

    def on_lost(self) -> None:
        if not self.done.done():
            self.done.set_exception(FetchError("the connection was closed"))
