"""What one client can do to the others with requests that are well-formed: seen by a client that tried to do harm."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

import pytest

from pdserve.pd.errors import ApiError
from pdserve.pd.http.incoming import Budget
from pdserve.pd.requests.body import Body
from pdserve.pd.requests.dialects import BY_PATH, CHAT, COMPLETIONS
from pdserve.pd.telemetry.usage_meter import Fingerprints, metered
from tests.proxy.deployment import Deployment
from tests.proxy.raw import RawClient, raw_deployment

MIB = 1 << 20


def test_large_uploads_leave_room_for_small_requests() -> None:
    budget = Budget(512 * MIB)
    uploads = 0
    size = 64 * MIB
    while size > 65_536:
        if budget.fits(size, more=size):
            budget.held += size
            uploads += 1
        else:
            size //= 2
    assert uploads > 8
    for _ in range(500):
        assert budget.fits(60_000, more=60_000)
        budget.held += 60_000


@pytest.mark.process
def test_a_request_of_thousands_of_headers_is_refused(tmp_path: Path) -> None:
    """Each takes 150 bytes of memory, however short it is."""
    with raw_deployment(tmp_path) as raw, RawClient(raw.proxy.port) as client:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: proxy\r\n" + b"a:\r\n" * 9_000
        assert client.send(head).response().status == 431


def test_a_member_that_should_be_small_is_not_decoded_when_it_is_large() -> None:
    large = b'{"stream":true,"stream_options":{%b}}' % b",".join(b'"%d":1,"%d":1' % (n, n) for n in range(200_000))
    body = Body(large)
    same, _ = metered(BY_PATH[b"/v1/responses"], body, Fingerprints())
    assert same is body
    with pytest.raises(ApiError, match="longer than 1024 bytes"):
        metered(COMPLETIONS, body, Fingerprints())


def test_the_meter_does_not_read_a_body_anew() -> None:
    body = Body(b'{"stream":true,"prompt":"%b"}' % (b"x" * MIB))
    asked, _ = metered(COMPLETIONS, body, Fingerprints())
    assert asked.raw is body.raw
    assert Body(bytes(asked.payload)).get("stream_options") == {"include_usage": True, "continuous_usage_stats": True}


def test_a_quota_counts_what_an_engine_computes_whatever_the_path() -> None:
    body = Body(b'{"messages":[],"tools":[{"description":"%b"}]}' % (b"word " * 1000))
    (_, begin, end), (_, first, last) = BY_PATH[b"/invocations"].prompt(body), CHAT.prompt(body)
    assert end - begin >= last - first > 5000


def test_a_client_that_leaves_what_decode_refuses_leaves_no_kv(deployment: Deployment) -> None:
    deployment.up()
    for _ in range(10):
        with deployment.proxy.open("/v1/completions", {"model": "tiny", "prompt": "x", "stop": ["a"] * 5}) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    deployment.idle()
    assert deployment.complete().status_code == 200


@pytest.mark.process
def test_many_who_ask_for_the_models_ask_an_engine_once(tmp_path: Path) -> None:
    with raw_deployment(tmp_path) as raw:
        before = len(raw.engine.seen)
        clients = [RawClient(raw.proxy.port) for _ in range(20)]
        for client in clients:
            client.send(b"GET /v1/models HTTP/1.1\r\nhost: proxy\r\n\r\n")
        assert {client.response().status for client in clients} == {200}
        for client in clients:
            client.close()
        asked = [seen for seen in raw.engine.seen[before:] if seen.line.startswith("GET /v1/models")]
        assert len(asked) < 20
