"""The one wait: readiness against death against the limit, with a clock that the test turns."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pdserve.health import ProbeAnswer, Prober, Waited, wait_ready
from pdserve.plan.process import HttpProbe


class Clock:
    """Seconds that pass only when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def answers(*given: ProbeAnswer) -> Iterator[ProbeAnswer]:
    yield from given
    while True:
        yield given[-1]


NO, YES = ProbeAnswer(False, "not yet"), ProbeAnswer(True, "200")


async def waited(
    *given: ProbeAnswer, seconds: float = 10, step: float = 0.0, death: str | None = None, dies_at: int = -1
) -> Waited[str]:
    clock, replies, tries = Clock(), answers(*given), 0
    dying: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    if death is not None and dies_at < 0:
        dying.set_result(death)

    async def probe() -> ProbeAnswer:
        nonlocal tries
        clock.now += step
        if tries == dies_at and death is not None:
            dying.set_result(death)
        tries += 1
        return next(replies)

    return await wait_ready(probe, death=dying, seconds=seconds, clock=clock, interval=0)


def test_ready_as_soon_as_the_probe_passes() -> None:
    result = asyncio.run(waited(NO, NO, YES, step=1))
    assert result == Waited(ready=True, died=None, seconds=3, last_answer="200")


def test_death_wins_over_the_limit() -> None:
    result = asyncio.run(waited(NO, step=1, seconds=1000, death="killed", dies_at=2))
    assert (result.ready, result.died, result.seconds) == (False, "killed", 3)


def test_death_wins_over_a_probe_that_passes_at_the_same_time() -> None:
    """A stale server answers 200 while ours is dying: the answer proves nothing."""
    result = asyncio.run(waited(YES, death="exited with code 3", dies_at=0))
    assert (result.ready, result.died) == (False, "exited with code 3")


def test_already_dead() -> None:
    assert asyncio.run(waited(YES, death="gone")).died == "gone"


def test_late_with_the_last_answer() -> None:
    result = asyncio.run(waited(NO, step=3, seconds=10))
    assert (result.ready, result.died, result.last_answer) == (False, None, "not yet")
    assert result.seconds >= 10


async def test_a_death_is_seen_while_a_probe_hangs() -> None:
    dying: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def hangs() -> ProbeAnswer:
        dying.set_result("killed")
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    outcome = await wait_ready(hangs, death=dying, seconds=1000, clock=lambda: 0.0)
    assert outcome.died == "killed"


def probe(port: int, family: set[int]) -> ProbeAnswer:
    async def once() -> ProbeAnswer:
        prober = Prober(lambda: family)
        try:
            return await prober.check(HttpProbe(host="127.0.0.1", port=port, path="/health"))
        finally:
            await prober.close()

    return asyncio.run(once())


def test_an_answer_of_another_process_does_not_count() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        answer = probe(stranger.getsockname()[1], {1})
    assert not answer.ready
    assert "not ours" in answer.text
    assert f"PID {os.getpid()}" in answer.text


@pytest.mark.parametrize(("protocol", "ready"), [("HTTP/1.0", False), ("HTTP/1.1", True)])
def test_who_answers_is_looked_up_again_for_each_new_connection(protocol: str, ready: bool) -> None:
    """The socket changes hands; only a connection that has lasted still leads to the process that was ours."""

    class Healthy(BaseHTTPRequestHandler):
        protocol_version = protocol

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

    family = {os.getpid()}

    async def twice(port: int) -> tuple[ProbeAnswer, ProbeAnswer]:
        prober, asked = Prober(lambda: family), HttpProbe(host="127.0.0.1", port=port, path="/health")
        first = await prober.check(asked)
        family.clear()
        second = await prober.check(asked)
        await prober.close()
        return first, second

    with ThreadingHTTPServer(("127.0.0.1", 0), Healthy) as server:
        threading.Thread(target=server.serve_forever).start()
        first, second = asyncio.run(twice(server.server_port))
        server.shutdown()
    assert first.ready
    assert second.ready is ready
    assert ready or "not ours" in second.text


def test_an_answer_over_a_connection_that_lasts_does_not_count_for_ever() -> None:
    """Ours has stopped listening and serves on whoever is connected."""

    serving: list[asyncio.Task[None] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(asyncio.current_task())
        with suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()
        await writer.wait_closed()

    async def checks() -> list[ProbeAnswer]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        prober, asked = Prober(lambda: {os.getpid()}), HttpProbe(host="127.0.0.1", port=port, path="/health")
        answers = [await prober.check(asked)]
        server.close()
        answers += [await prober.check(asked) for _ in range(20)]
        await prober.close()
        await asyncio.gather(*filter(None, serving))
        return answers

    answers = asyncio.run(checks())
    assert answers[0].ready
    assert not answers[-1].ready
    assert "nothing listens" in answers[-1].text


def test_the_port_stays_free_when_the_kernel_connects_us_to_ourselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody listens it may take the port itself for our end of the connection, if it may choose that one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    itself = partial(asyncio.open_connection, local_addr=("127.0.0.1", port))
    monkeypatch.setattr(asyncio, "open_connection", itself)
    assert probe(port, {os.getpid()}).text == f"nothing listens on port {port} of 127.0.0.1"
    with socket.socket() as owner:
        owner.bind(("127.0.0.1", port))


def test_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert probe(port, {os.getpid()}).text == f"nothing listens on port {port} of 127.0.0.1"


def test_our_socket_that_does_not_speak_http_is_not_ready() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=1) as server:
        server.settimeout(60)
        port = server.getsockname()[1]

        async def once() -> ProbeAnswer:
            prober = Prober(lambda: {os.getpid()})
            asking = asyncio.create_task(prober.check(HttpProbe(host="127.0.0.1", port=port, path="/health")))
            for _ in ("is a server there?", "GET"):
                connection, _ = await asyncio.to_thread(server.accept)
                connection.close()
            answer = await asking
            await prober.close()
            return answer

        assert not asyncio.run(once()).ready
