"""The data plane: legs to engines, and the client's side of a relayed answer.

A leg holds back the head of a stream until its first data event, because vLLM answers 200 before it knows whether
the KV arrives: up to then a failure still has a proper status, and another attempt is still possible.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from starlette.types import Message, Receive, Scope, Send

from pdserve.pd.errors import ApiError, ClientGoneError, WorkerFailedError, from_event, from_upstream
from pdserve.pd.registry import Worker

log = logging.getLogger("pdserve.proxy")

EVENT_STREAM = "text/event-stream"
DONE = b"data: [DONE]"


class Upstream:
    """Connections to the engines, with the deployment's key and never through a proxy of the environment."""

    def __init__(self, key: str | None, connect_timeout: float) -> None:
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.AsyncClient(
            trust_env=False,
            timeout=httpx.Timeout(None, connect=connect_timeout),
            # vLLM closes an idle connection after 5 s: leave it first, or a request races with its end.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=2.0),
        )

    async def send(
        self, url: str, body: bytes, headers: Mapping[str, str], trace: Callable[[str, Any], Any]
    ) -> httpx.Response:
        request = self._client.build_request(
            "POST",
            url,
            content=body,
            headers={"content-type": "application/json", "accept-encoding": "identity", **headers, **self._headers},
            extensions={"trace": trace},
        )
        return await self._client.send(request, stream=True)

    async def get(self, url: str, *, key: bool, timeout: float = 5.0) -> httpx.Response:
        """A short GET; the key only goes to engines, not to bootstrap servers."""
        return await self._client.get(url, headers=self._headers if key else {}, timeout=timeout)

    async def close(self) -> None:
        await self._client.aclose()


@dataclass
class Answer:
    """A good answer whose beginning has arrived."""

    content_type: str
    head: bytes
    rest: AsyncIterator[bytes] | None
    """None: `head` is all of it."""


class Leg:
    """One request to one worker, from now until `close`."""

    def __init__(self, upstream: Upstream, worker: Worker, path: str, body: bytes, headers: Mapping[str, str]) -> None:
        self.worker = worker
        self.sent = asyncio.Event()
        """The engine has the whole request (or the leg has ended without that)."""
        self.reached = False
        """The same, only true if it really has."""
        self._response: httpx.Response | None = None
        self._closed = False
        worker.in_flight += 1
        worker.served += 1
        self.answer = asyncio.ensure_future(self._open(upstream, path, body, headers))
        # A leg that nobody awaits any more may fail in silence.
        self.answer.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def close(self) -> None:
        """Ends the leg: an engine that is still working on it sees its client leave and aborts."""
        if self._closed:
            return
        self._closed = True
        self.worker.in_flight -= 1
        self.answer.cancel()
        await asyncio.wait({self.answer})
        if self._response is not None:
            await self._response.aclose()

    async def _open(self, upstream: Upstream, path: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        worker = self.worker
        try:
            self._response = await upstream.send(worker.config.url + path, body, headers, self._trace)
            return await self._begin(self._response)
        except httpx.ConnectError as error:
            raise self._failed(f"{worker.name} cannot be reached", retry=True) from error
        except httpx.ConnectTimeout as error:
            raise self._failed(f"{worker.name} cannot be reached in time", retry=True) from error
        except httpx.HTTPError as error:
            raise self._failed(f"{worker.name} closed the connection", retry=True) from error
        finally:
            self.sent.set()

    async def _begin(self, response: httpx.Response) -> Answer:
        content_type = response.headers.get("content-type", "application/json")
        if response.status_code != 200:
            error = from_upstream(self.worker.name, response.status_code, await response.aread())
            raise WorkerFailedError(self.worker, error, retry=False)
        if not content_type.startswith(EVENT_STREAM):
            return Answer(content_type, await response.aread(), None)
        rest = response.aiter_bytes()
        head = b""
        async for chunk in rest:
            head += chunk
            if (data := _first_event(head)) is not None:
                if failure := from_event(self.worker.name, data):
                    raise WorkerFailedError(self.worker, failure, retry=False)
                return Answer(content_type, head, rest)
        raise self._failed(f"{self.worker.name} ended the stream before its first event", retry=True)

    async def _trace(self, event: str, info: Any) -> None:
        if event == "http11.send_request_body.complete":
            self.reached = True
            self.sent.set()

    def _failed(self, message: str, *, retry: bool) -> WorkerFailedError:
        return WorkerFailedError(self.worker, ApiError(502, message), retry=retry)


class Client:
    """Who is being answered. `interrupted` is done when the answer must end early, with the reason as its result."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self.request_id = request_id
        self.started = False
        self._stream = False
        self.interrupted: asyncio.Future[ApiError | ClientGoneError] = asyncio.get_running_loop().create_future()

    def interrupt(self, reason: ApiError | ClientGoneError) -> None:
        if not self.interrupted.done():
            self.interrupted.set_result(reason)

    async def watch(self, receive: Receive) -> None:
        """Runs beside the answer: uvicorn's send() says nothing about a client that has gone."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.interrupt(ClientGoneError())

    async def relay(self, answer: Answer, worker: Worker) -> None:
        """Send an answer on as it comes. 502, as an event if need be, when the engine cuts it."""
        self._stream = answer.content_type.startswith(EVENT_STREAM)
        if answer.rest is None:
            await self._start(200, {"content-type": answer.content_type, "content-length": str(len(answer.head))})
            await self._write(answer.head, more=False)
            return
        await self._start(200, {"content-type": answer.content_type, "cache-control": "no-cache"})
        # Whole events only: an error event after half a line would be read as part of that line.
        pending, tail = await self._write_events(answer.head), answer.head
        try:
            async for chunk in answer.rest:
                tail = (tail + chunk)[-64:]
                pending = await self._write_events(pending + chunk)
        except httpx.HTTPError as error:
            raise ApiError(502, f"{worker.name} closed the connection in the middle of its answer") from error
        if DONE not in tail:
            raise ApiError(502, f"{worker.name} ended its answer early")
        await self._write(pending, more=False)

    async def fail(self, error: ApiError) -> None:
        """Answer with an error: as the response if there is none yet, otherwise as the last event of the stream."""
        log.warning("%s: %d %r", self.request_id, error.status, error.message)
        body = json.dumps(error.body()).encode()
        if not self.started:
            headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers()}
            await self._start(error.status, headers)
            await self._write(body, more=False)
        elif self._stream:
            await self._write(b"data: " + body + b"\n\n", more=False)

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.started = True
        pairs = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        pairs.append((b"x-request-id", self.request_id.encode("latin-1")))
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def _write_events(self, data: bytes) -> bytes:
        """Send the complete events; what is left of them."""
        end = data.rfind(b"\n\n") + 2
        if end < 2:
            return data
        await self._write(data[:end], more=True)
        return data[end:]

    async def _write(self, data: bytes, *, more: bool) -> None:
        message: Message = {"type": "http.response.body", "body": data, "more_body": more}
        await self._send(message)


class Exchange:
    """The ASGI response of a relayed request: runs it, and answers whatever goes wrong."""

    def __init__(self, request_id: str, run: Callable[[Client], Awaitable[None]]) -> None:
        self._request_id = request_id
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = Client(send, self._request_id)
        watch = asyncio.ensure_future(client.watch(receive))
        try:
            await self._run(client)
        except ApiError as error:
            await client.fail(error)
        except ClientGoneError:
            log.info("%s: the client left", client.request_id)
        finally:
            watch.cancel()


def _first_event(data: bytes) -> bytes | None:
    """The data of the first complete event; comments (keep-alives) are no events."""
    *events, _ = data.replace(b"\r\n", b"\n").split(b"\n\n")
    for event in events:
        lines = [line[5:].lstrip() for line in event.split(b"\n") if line.startswith(b"data:")]
        if lines:
            return b"\n".join(lines)
    return None
