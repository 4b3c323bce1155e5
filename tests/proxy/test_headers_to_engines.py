"""What of a request's head and id reaches an engine, and comes back in the log and the answer."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pdserve.pd.config.serving import Serving
from pdserve.pd.config.settings import OWN_HEADERS
from tests.proxy.raw import RawDeployment, Send, post, raw_deployment, whole
from tests.tables import each_row

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"model": "tiny", "prompt": "hi"}
RAW: dict[str, Any] = {"forward_headers": ["Baggage", "x-tenant"], "log": "json"}


def engine_headers(raw: RawDeployment) -> dict[str, str]:
    return dict(raw.engine.seen[-1].headers)


def test_headers_that_are_named_reach_engines_beside_the_usual_ones(raw: RawDeployment) -> None:
    sent = ("baggage: a=1", "X-Tenant: blue", "tracestate: b=2", "x-other: no", "cookie: no")
    assert raw.ask(post(COMPLETIONS, BODY, *sent)).status == 200
    got = engine_headers(raw)
    assert {name: got.get(name) for name in ("baggage", "x-tenant", "tracestate")} == {
        "baggage": "a=1",
        "x-tenant": "blue",
        "tracestate": "b=2",
    }
    assert not {"x-other", "cookie"} & got.keys()


@each_row("name", [*sorted(OWN_HEADERS), "Content-Length", "x y", "x:y", ""])
def test_a_header_that_is_the_proxys_own_cannot_be_named(name: str) -> None:
    with pytest.raises(ValidationError):
        Serving(forward_headers=[name])


@each_row(
    "path, given, headers, expected",
    [
        (COMPLETIONS, "body-id", (), "body-id"),
        ("/v1/chat/completions", "body-id", (), "body-id"),
        (COMPLETIONS, "body-id", ("x-request-id: from-head",), "from-head"),
        (COMPLETIONS, "two words", (), None),
        (COMPLETIONS, 7, (), None),
        (COMPLETIONS, "x" * 257, (), None),
        (COMPLETIONS, None, (), None),
        # Its engine takes it from the body, whatever a header says.
        ("/v1/responses", "body-id", (), None),
    ],
)
def test_a_request_may_be_named_in_its_body(
    raw: RawDeployment, path: str, given: object, headers: tuple[str, ...], expected: str | None
) -> None:
    answer = raw.ask(post(path, BODY | {"request_id": given, "messages": [{}], "input": "hi"}, *headers))
    assert answer.status == 200
    id_ = engine_headers(raw)["x-request-id"]
    assert answer.headers["x-request-id"] == id_
    assert (id_ == expected) if expected is not None else (id_ != given and len(id_) == 32)


def test_the_model_that_is_asked_for_is_in_the_log(raw: RawDeployment) -> None:
    raw.ask(post(COMPLETIONS, {"model": "adapter-7", "prompt": "hi"}, "x-request-id: of-adapter"))
    line = json.loads(raw.proxy.until('^{.*"of-adapter".*')[0])
    assert line["model"] == "adapter-7"


def test_errors_below_messages_have_anthropics_shape(raw: RawDeployment) -> None:
    for request in (
        post("/v1/messages/batches", {"requests": []}),
        b"GET /v1/messages/batches HTTP/1.1\r\nhost: proxy\r\n\r\n",
    ):
        answer = raw.ask(request)
        assert (answer.status, answer.json()["type"], answer.json()["error"]["type"]) == (
            404,
            "error",
            "not_found_error",
        )
    assert "code" in raw.ask(post("/v1/message", BODY)).json()["error"]


def test_open_connections_are_counted(raw: RawDeployment) -> None:
    def counted() -> float:
        page = raw.ask(b"GET /metrics HTTP/1.1\r\nhost: proxy\r\n\r\n").body.decode()
        (value,) = [line.split(" ")[1] for line in page.splitlines() if line.startswith("pdserve_proxy_connections ")]
        return float(value)

    with raw.client() as first, raw.client():
        first.send(post(COMPLETIONS, BODY)).response()
        while counted() != 3:
            pass  # the page is made 20 times a second at most


def test_a_request_that_gets_429_at_once_is_not_tokenized(tmp_path: Path) -> None:
    limits = {"aggregated": {"max_requests": 1, "queue_size": 0}}
    routing = {"aggregated": {"kind": "kv_events"}}
    with raw_deployment(tmp_path, admission=limits, routing=routing) as raw:
        go_on = threading.Event()

        def script(send: Send) -> None:
            if "tokenize" in raw.engine.seen[-1].line:
                send(whole(b'{"tokens":[1,2]}'))
            else:
                assert go_on.wait(60)
                send(whole(b"{}"))

        raw.engine.script = script
        with raw.client() as first:
            first.send(post(COMPLETIONS, BODY))
            raw.engine.wait(lambda engine: len(engine.seen) == 2)
            assert raw.ask(post(COMPLETIONS, BODY)).status == 429
            go_on.set()
            assert first.response().status == 200
        assert [seen.line.split(" ")[1] for seen in raw.engine.seen] == ["/tokenize", COMPLETIONS]
