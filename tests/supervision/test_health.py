"""The one wait: readiness against death against the limit, with a clock that the test turns."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress

import pytest

from pdserve.health import ProbeAnswer, Prober, WaitOutcome, wait_ready
from pdserve.plan.process import HttpProbe, LmcacheProbe

NO, YES = ProbeAnswer(False, "not yet"), ProbeAnswer(True, "200")


async def waited(
    *given: ProbeAnswer, seconds: float = 10, step: float = 0.0, death: str = "", dies_at: int = -1
) -> WaitOutcome[str]:
    """A wait whose probe has these answers, the last of them for ever; each takes `step` seconds."""
    tries = 0
    dying: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def probe() -> ProbeAnswer:
        nonlocal tries
        if tries == dies_at:
            dying.set_result(death)
        tries += 1
        return given[min(tries, len(given)) - 1]

    return await wait_ready(probe, death=dying, seconds=seconds, clock=lambda: tries * step, interval=0)


async def test_death_wins_over_the_limit() -> None:
    result = await waited(NO, step=1, seconds=1000, death="killed", dies_at=2)
    assert (result.ready, result.died, result.seconds) == (False, "killed", 3)


async def test_death_wins_over_a_probe_that_passes_at_the_same_time() -> None:
    """A stale server answers 200 while ours is dying: the answer proves nothing."""
    result = await waited(YES, death="exited with code 3", dies_at=0)
    assert (result.ready, result.died) == (False, "exited with code 3")


async def test_late_with_the_last_answer() -> None:
    result = await waited(NO, step=3, seconds=10)
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


async def probe(port: int, family: set[int]) -> ProbeAnswer:
    prober = Prober(lambda: family)
    try:
        return await prober.check(HttpProbe(host="127.0.0.1", port=port, path="/health"))
    finally:
        await prober.close()


async def test_an_answer_of_another_process_does_not_count() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        answer = await probe(stranger.getsockname()[1], {1})
    assert not answer.ready
    assert "not ours" in answer.text
    assert f"PID {os.getpid()}" in answer.text


class Served:
    """An HTTP server of this process that answers every request with this body."""

    def __init__(self, body: str = "", *, keeps: bool = True) -> None:
        end = b"" if keeps else b"Connection: close\r\n"
        self._answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n%b\r\n%b" % (len(body), end, body.encode())
        self._keeps = keeps
        self.connections: list[asyncio.Task[None] | None] = []

    async def listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(asyncio.current_task())
        with suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(self._answer)
                if not self._keeps:
                    break
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("keeps", [False, True])
async def test_who_answers_is_looked_up_again_for_each_new_connection(keeps: bool) -> None:
    """The socket changes hands; only a connection that has lasted still leads to the process that was ours."""
    family = {os.getpid()}
    served = Served(keeps=keeps)
    async with await served.listen() as server:
        prober, port = Prober(lambda: family), server.sockets[0].getsockname()[1]
        asked = HttpProbe(host="127.0.0.1", port=port, path="/health")
        first = await prober.check(asked)
        family.clear()
        second = await prober.check(asked)
        await prober.close()
        await asyncio.gather(*filter(None, served.connections))
    assert (first.ready, second.ready) == (True, keeps)
    assert keeps or "not ours" in second.text


async def test_an_answer_over_a_connection_that_lasts_does_not_count_for_ever() -> None:
    """Ours has stopped listening and serves on whoever is connected."""
    served = Served()
    server = await served.listen()
    prober, port = Prober(lambda: {os.getpid()}), server.sockets[0].getsockname()[1]
    asked = HttpProbe(host="127.0.0.1", port=port, path="/health")
    answers = [await prober.check(asked)]
    server.close()
    answers += [await prober.check(asked) for _ in range(20)]
    await prober.close()
    await asyncio.gather(*filter(None, served.connections))
    assert answers[0].ready
    assert not answers[-1].ready
    assert "nothing listens" in answers[-1].text


@pytest.mark.parametrize(("name", "ready"), [("mine", True), ("mine-2", False)])
async def test_a_cache_server_of_another_name_is_not_ours(name: str, ready: bool) -> None:
    """One that yesterday's deployment has left on the port is as healthy."""
    served = Served(f'{{"instance_id": "{name}"}}')
    async with await served.listen() as server:
        prober, port = Prober(lambda: {os.getpid()}), server.sockets[0].getsockname()[1]
        answer = await prober.check(LmcacheProbe(host="127.0.0.1", port=port, instance_id="mine"))
        await prober.close()
        await asyncio.gather(*filter(None, served.connections))
    assert answer.ready is ready
    assert ready or "another instance answers" in answer.text


async def test_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert (await probe(port, {os.getpid()})).text == f"nothing listens on port {port} of 127.0.0.1"
