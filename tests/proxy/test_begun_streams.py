"""A stream that has begun keeps nothing of its request: nothing is sent again, and others need the room."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.proxy.deployment import MODEL, Deployment
from tests.proxy.hostile import EVENT, MEGABYTE, PATH, STREAM_HEAD
from tests.proxy.raw import RawClient, RawDeployment, Send, chunk, post, raw_deployment

pytestmark = pytest.mark.process

STREAMS = 40
LIMITS: dict[str, Any] = {"limits": {"max_buffered_bytes": 4 * MEGABYTE}, "max_body_bytes": MEGABYTE}
"""Room for three of the requests below at once."""
WAYS: dict[str, dict[str, Any]] = {
    "mooncake": {},
    "nixl": {"nixl": True},
    "nixl-push": {"push": True},
    "moriio": {"moriio": True},
    "one engine": {"aggregated": 1},
}


def large(**members: object) -> dict[str, object]:
    """A request that is nearly as large as one may be, most of it in what engines do not read."""
    return {"model": MODEL, "prompt": "hello", "stream": True, "max_tokens": 2, "pad": "x" * 900_000} | members


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_its_room_in_memory_is_free_for_others(deployment: Deployment, way: dict[str, Any]) -> None:
    deployment.up(**way, **LIMITS)
    proxy, answers = deployment.proxy, deployment.fakes[-1]
    answers.script(hold="token")
    with ExitStack() as stack:

        def begin(count: int) -> list[RawClient]:
            streams = [stack.enter_context(RawClient(proxy.port)) for _ in range(count)]
            for stream in streams:
                stream.send(post(PATH, large()))
                assert stream.until(b"data: ").startswith(b"HTTP/1.1 200 ")
            return streams

        streams = begin(4)
        before = proxy.memory("VmRSS")
        streams += begin(STREAMS)
        assert proxy.memory("VmRSS") - before < STREAMS * MEGABYTE / 3
        answers.script(hold="")
        for stream in streams:
            stream.until(b"data: [DONE]\n\n")
    answers.wait(running=0, waiting=0)


def test_while_its_engine_may_still_fail_it_is_kept(tmp_path: Path) -> None:
    """The control for the test above: a fourth request has no room while three wait for their first event."""
    release = threading.Event()

    def held(send: Send) -> None:
        send(STREAM_HEAD)
        release.wait()
        send(chunk(EVENT) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    with raw_deployment(tmp_path, **LIMITS) as raw, ExitStack() as stack:
        raw.engine.script = held
        for _ in range(3):
            stack.enter_context(raw.client()).send(post(PATH, large()))
        raw.engine.wait(lambda engine: len(engine.seen) == 3)
        assert raw.ask(post(PATH, large())).status == 503
        release.set()
        raw.engine.wait_left()


def test_the_log_still_has_its_id_and_its_times(raw: RawDeployment) -> None:
    raw.engine.script = lambda send: send(STREAM_HEAD + chunk(EVENT) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
    with raw.client() as client:
        client.send(post(PATH, large(), "x-request-id: begun-stream-1"))
        assert client.response().headers["x-request-id"] == "begun-stream-1"
    raw.proxy.until(r"ok 200 /v1/completions id=begun-stream-1 .*ttft_ms=\d")
