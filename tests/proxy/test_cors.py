"""Web pages of other origins: what browsers are told about them, as the Fetch standard has it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pdserve.pd.config.settings import CorsSettings
from pdserve.pd.http.cors import Cors
from pdserve.pd.http.incoming import Budget, Request
from tests.proxy.deployment import keys_file
from tests.proxy.raw import RawDeployment, Response, chunk, head, post, raw_deployment, sends
from tests.proxy.rows import each

PAGE = "https://chat.example"
COMPLETIONS = "/v1/completions"
BODY = {"prompt": "hi"}
STREAM = head("text/event-stream") + chunk(b'data: {"choices":[]}\n\n') + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
ALLOWED = "access-control-allow-origin"


def told(settings: dict[str, Any], origin: str | None) -> dict[bytes, bytes]:
    request = Request("", Budget(0), tls=False)
    if origin is not None:
        request.headers.append((b"origin", origin.encode()))
    return dict(Cors(CorsSettings.model_validate(settings)).headers(request))


@each(
    "settings, origin, allowed, varies",
    [
        ({"origins": [PAGE]}, PAGE, PAGE, True),
        ({"origins": [PAGE]}, "https://CHAT.example", "https://CHAT.example", True),
        ({"origins": [PAGE]}, "http://chat.example", None, True),
        ({"origins": [PAGE]}, "https://chat.example.evil", None, True),
        ({"origins": [PAGE]}, "null", None, True),
        ({"origins": [PAGE]}, None, None, True),
        ({"origins": ["*"]}, "https://other.example", "*", False),
        # Browsers refuse an asterisk with credentials.
        ({"origins": ["*"], "credentials": True}, "https://other.example", "https://other.example", True),
    ],
)
def test_an_answer_names_the_origin_that_may_read_it(
    settings: dict[str, Any], origin: str | None, allowed: str | None, varies: bool
) -> None:
    headers = told(settings, origin)
    assert headers.get(ALLOWED.encode()) == (None if allowed is None else allowed.encode())
    assert (headers.get(b"vary") == b"origin") == varies
    credentials = bool(settings.get("credentials")) and allowed is not None
    assert (headers.get(b"access-control-allow-credentials") == b"true") == credentials


@each("origin", ["chat.example", "https://chat.example/", "https://chat example", ""])
def test_what_no_browser_sends_as_an_origin_is_refused(origin: str) -> None:
    with pytest.raises(ValidationError):
        CorsSettings(origins=[origin])


@pytest.fixture(scope="module")
def module_raw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RawDeployment]:
    """On loopback and without keys: `allowed_hosts` alone would let no page of another host ask."""
    folder = tmp_path_factory.mktemp("cors")
    with raw_deployment(folder, cors={"origins": [PAGE]}, allowed_hosts=["proxy"]) as raw:
        yield raw


def preflight(raw: RawDeployment, origin: str = PAGE, path: str = COMPLETIONS) -> Response:
    lines = [f"OPTIONS {path} HTTP/1.1", "host: proxy", f"origin: {origin}", "access-control-request-method: POST"]
    return raw.ask("\r\n".join([*lines, "access-control-request-headers: authorization, x-mine", "", ""]).encode())


@each("path", [COMPLETIONS, "/v1/models", "/v1/responses/resp_1/cancel"])
def test_a_browser_that_asks_first_is_told_what_the_page_may_send(raw: RawDeployment, path: str) -> None:
    answer = preflight(raw, path=path)
    assert (answer.status, answer.body, answer.headers[ALLOWED]) == (204, b"", PAGE)
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-headers"] == "authorization, x-mine"


def test_a_page_that_is_not_named_gets_nothing(raw: RawDeployment) -> None:
    answer = preflight(raw, "https://evil.example")
    assert answer.status == 403
    assert ALLOWED not in answer.headers
    assert raw.ask(post(COMPLETIONS, BODY, "origin: https://evil.example")).status == 403
    assert raw.engine.seen == []


@each("asked", ["whole", "stream", "an error", "a page", "no JSON", "a bad head"])
def test_a_page_can_read_every_answer(raw: RawDeployment, asked: str) -> None:
    origin = f"origin: {PAGE}"
    if asked == "stream":
        raw.engine.script = sends(STREAM)
    request, status = {
        "whole": (post(COMPLETIONS, BODY, origin), 200),
        "stream": (post(COMPLETIONS, BODY | {"stream": True}, origin), 200),
        "an error": (post("/v1/nothing", BODY, origin), 404),
        "a page": (f"GET /v1/models HTTP/1.1\r\nhost: proxy\r\n{origin}\r\n\r\n".encode(), 200),
        "no JSON": (post(COMPLETIONS, b"{", origin), 400),
        "a bad head": (
            f"POST {COMPLETIONS} HTTP/1.1\r\n{origin}\r\nhost: proxy\r\nhost: a\r\n\r\n".encode(),
            400,
        ),
    }[asked]
    answer = raw.ask(request)
    assert (answer.status, answer.complete, answer.headers[ALLOWED]) == (status, True, PAGE)
    assert "x-request-id" in answer.headers["access-control-expose-headers"]


@pytest.mark.process
def test_keys_are_asked_of_the_page_and_not_of_the_browser_that_asks_first(tmp_path: Path) -> None:
    with raw_deployment(tmp_path, cors={"origins": [PAGE]}, auth=keys_file(tmp_path, ("team", "a-key"))) as raw:
        assert preflight(raw).status == 204
        refused = raw.ask(post(COMPLETIONS, BODY, f"origin: {PAGE}"))
        assert (refused.status, refused.headers[ALLOWED]) == (401, PAGE)
        assert raw.ask(post(COMPLETIONS, BODY, f"origin: {PAGE}", "authorization: Bearer a-key")).status == 200


@pytest.mark.process
def test_without_the_section_no_answer_speaks_of_origins(tmp_path: Path) -> None:
    with raw_deployment(tmp_path, allowed_hosts=["*"]) as raw:
        answer = raw.ask(post(COMPLETIONS, BODY, f"origin: {PAGE}"))
        assert answer.status == 200
        assert not {"vary", ALLOWED} & answer.headers.keys()
        assert preflight(raw).status == 405
