"""What nobody expected ends one request, with an answer, and nothing stays of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from pdserve.pd.config.proxy import ProxyConfig, WorkerConfig
from pdserve.pd.http import bridge
from pdserve.pd.http.incoming import Budget, Request
from pdserve.pd.http.reply import HttpReply, ReplyConnection
from pdserve.pd.processes import shared_numbers
from pdserve.pd.relay.client import Client
from pdserve.pd.requests.request import ClientRequest
from pdserve.pd.serve.gateway import Gateway

BODY = b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'


class Wire(ReplyConnection):
    """The connection of one client."""

    def __init__(self) -> None:
        self.congested = False
        self.sent = b""
        self.over = asyncio.Event()

    def send(self, data: bytes) -> None:
        self.sent += data

    def replied(self, _: HttpReply) -> None:
        self.over.set()

    def abort(self) -> None:
        raise AssertionError("a client was left without an answer")

    def reset(self) -> None:
        raise AssertionError("a client was left without an answer")


async def broken(*_: Any) -> None:
    raise ZeroDivisionError("of the application")


def config() -> ProxyConfig:
    workers = (
        WorkerConfig(name="prefill-0", role="prefill", url="http://127.0.0.1:1", bootstrap_url="http://127.0.0.1:2"),
        WorkerConfig(name="decode-0", role="decode", url="http://127.0.0.1:3"),
    )
    return ProxyConfig(port=1, protocol="mooncake", served_name="m", workers=workers, allowed_hosts=["*"])


class WireToCut(Wire):
    """One whose answer has begun: nothing but its end can follow."""

    def abort(self) -> None:
        self.over.set()


async def asked(
    target: bytes,
    body: bytes,
    monkeypatch: pytest.MonkeyPatch,
    serve: Callable[..., Any] = broken,
    wire: type[Wire] = Wire,
) -> tuple[Gateway, Budget, bytes]:
    """The gateway, the budget and the answer, once nothing is being answered any more. `serve`: the way of a request to
    its engines."""
    wanted = config()
    gateway = Gateway(wanted, None, shared_numbers.private(Gateway.numbers(wanted)), broken)
    monkeypatch.setattr(gateway._answering, "_serve", serve)
    budget = Budget(1 << 20)
    request = Request("127.0.0.1", budget, tls=False)
    request.method, request.target = (b"POST" if body else b"GET"), target
    request.headers = [(b"content-type", b"application/json"), (b"x-request-id", b"unexpected-1")]
    request.parts, request.body_bytes = [body], len(body)
    assert request.hold(len(body))
    client = wire()
    gateway.handle(request, HttpReply(client, keep_alive=True, head_only=False, http10=False))
    assert gateway.busy()
    async with asyncio.timeout(60):
        await client.over.wait()
    return gateway, budget, client.sent


def requests_of(gateway: Gateway) -> list[tuple[tuple[str, ...], int]]:
    """(path, status) -> how many."""
    return list(gateway.metrics._counters["requests"].items())


@pytest.mark.parametrize(("target", "body"), [(b"/health", b""), (b"/v1/chat/completions", BODY)])
def test_an_unexpected_error_is_answered_and_logged(
    target: bytes, body: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, logger="pdserve.proxy"):
        gateway, budget, answer = asyncio.run(asked(target, body, monkeypatch))
    assert answer.startswith(b"HTTP/1.1 500 ")
    assert b"The proxy failed: ZeroDivisionError" in answer
    assert not gateway.busy()
    assert budget.held == 0
    assert [count for (_, status), count in requests_of(gateway) if status == "500"] == [1]
    assert len(requests_of(gateway)) == 1
    [record] = [record for record in caplog.records if record.name == "pdserve.proxy"]
    assert record.getMessage() == f"{target.decode()} failed"
    assert record.exc_info is not None


def test_an_error_in_an_answer_cuts_it_and_is_logged(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The request's headers, where its id came from, have left memory by then."""

    async def begun(request: ClientRequest, client: Client) -> None:
        client.reply.start(200, [])
        request.drop_content()
        raise ZeroDivisionError("of the proxy")

    gateway, budget, _ = asyncio.run(asked(b"/v1/chat/completions", BODY, monkeypatch, begun, WireToCut))
    assert budget.held == 0
    gateway.log.flush()
    [line] = [line for line in capfd.readouterr().err.splitlines() if "id=" in line]
    assert " id=unexpected-1 " in line
    assert "The proxy failed: ZeroDivisionError" in line


# --- an ASGI application that answers in parts hears that its client has gone


class SlowClient(ReplyConnection):
    """It reads nothing: all that it is sent waits."""

    def __init__(self) -> None:
        self.congested = True
        self.sent = asyncio.Event()

    def send(self, data: bytes) -> None:
        self.sent.set()

    def replied(self, reply: HttpReply) -> None:
        raise AssertionError("a client that has gone got an end")

    def abort(self) -> None:
        raise AssertionError("a client that has gone was closed once more")


async def test_one_that_waits_for_a_slow_client_hears_it_go() -> None:
    heard: list[str] = []

    async def app(_: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"a part", "more_body": True})
        heard.append((await receive())["type"])

    request, client = Request("127.0.0.1", Budget(1), tls=False), SlowClient()
    request.method, request.target = b"GET", b"/page"
    reply = HttpReply(client, keep_alive=True, head_only=False, http10=False)
    serving = asyncio.ensure_future(bridge.serve(app, request, reply))
    await client.sent.wait()
    reply.lost()
    await asyncio.wait({serving}, timeout=10)
    assert serving.done()
    assert heard == ["http.disconnect"]
