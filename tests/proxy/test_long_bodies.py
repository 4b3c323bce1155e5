"""Bodies so long that most of one goes past the request parser (http.connection): where they end, and what follows."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from tests.proxy.hostile import BODY, PATH
from tests.proxy.raw import ANSWER, RawDeployment, post, raw_deployment
from tests.proxy.rows import each

pytestmark = pytest.mark.process

LONG = json.dumps({"prompt": "".join(f"line {number}\n" for number in range(60_000))}).encode()
CUTS: dict[str, Callable[[int], list[int]]] = {
    "at once": lambda size: [],
    "head apart": lambda size: [200],
    "little of the body first": lambda size: [1000],
    "small pieces": lambda size: list(range(1000, 61_000, 3000)),
    "all but the last byte": lambda size: [size - 1],
    "the beginning of the next one with its end": lambda size: [size - 1, size + 30],
}
"""Where two requests, of which the first has that size, are cut."""


@each("cuts", CUTS)
@each("headers", [(), ("connection: Upgrade", "upgrade: h2c")])
def test_it_arrives_whole_and_the_next_request_begins_behind_it(
    raw: RawDeployment, cuts: Callable[[int], list[int]], headers: tuple[str, ...]
) -> None:
    raw.engine.seen.clear()
    first, next_one = post(PATH, LONG, *headers), post(PATH, BODY)
    both, places = first + next_one, cuts(len(first))
    with raw.client() as client:
        client.send(*(both[begin:end] for begin, end in pairwise([0, *places, len(both)])))
        assert [client.response().body for _ in range(2)] == [ANSWER, ANSWER]
        assert client.send(next_one).response().status == 200
    assert [seen.body for seen in raw.engine.seen] == [LONG, BODY, BODY]


def test_behind_the_last_request_of_a_connection_nothing_is_read(raw: RawDeployment) -> None:
    with raw.client() as client:
        client.send(post(PATH, LONG, "connection: close") + post(PATH, BODY))
        answer = client.response()
        assert (answer.body, answer.headers["connection"]) == (ANSWER, "close")
        assert client.ended() == b""
    assert [seen.body for seen in raw.engine.seen] == [LONG]


def test_what_is_no_request_behind_it_ends_the_connection(raw: RawDeployment) -> None:
    with raw.client() as client:
        client.send(post(PATH, LONG) + b"\x00\x00\r\n\r\n")
        assert client.response().body == ANSWER
        assert client.ended() == b""
    assert [seen.body for seen in raw.engine.seen] == [LONG]


def test_two_in_a_row_are_two(raw: RawDeployment) -> None:
    other = LONG.replace(b"line", b"LINE")
    with raw.client() as client:
        client.send(post(PATH, LONG) + post(PATH, other))
        assert [client.response().body for _ in range(2)] == [ANSWER, ANSWER]
    assert [seen.body for seen in raw.engine.seen] == [LONG, other]


def test_a_client_that_leaves_in_the_middle_leaves_nothing_behind(tmp_path: Path) -> None:
    """What its requests held of the memory for bodies is there for others."""
    request = post(PATH, LONG)
    with raw_deployment(tmp_path, limits={"max_buffered_bytes": 4 * len(LONG)}) as raw:
        for _ in range(20):
            with raw.client() as client:
                client.send(request[:-1]).socket.shutdown(socket.SHUT_WR)
                assert client.ended() == b""
        assert raw.ask(request).body == ANSWER
        assert [seen.body for seen in raw.engine.seen] == [LONG]
