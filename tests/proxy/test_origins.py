"""Web pages: those of other hosts get nothing, and those of other origins what browsers are told, as the Fetch
standard has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.pd.config.proxy import ProxyConfig
from pdserve.pd.config.settings import CorsSettings
from pdserve.pd.http.cors import Cors
from pdserve.pd.http.incoming import Budget, Request
from pdserve.pd.limits.allowed_hosts import AllowedHosts
from tests.proxy.deployment import keys_file
from tests.proxy.raw import RawDeployment, Response, chunk, head, post, raw_deployment, sends
from tests.tables import each_row

CONFIG: dict[str, Any] = {"port": 8000, "served_name": "tiny", "protocol": "aggregated", "workers": []}
BODY = b'{"prompt": "hi"}'


def hosts(**config: Any) -> AllowedHosts | None:
    return AllowedHosts.of(ProxyConfig.model_validate(CONFIG | config))


@each_row(
    "config, enforced",
    [
        ({}, True),
        ({"host": "localhost"}, True),
        ({"host": "::1"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "10.0.0.1"}, False),
        ({"auth": {"keys_file": "keys.yaml"}}, False),
        ({"host": "0.0.0.0", "allowed_hosts": ["models.example"]}, True),
        ({"allowed_hosts": ["*"]}, False),
    ],
)
def test_names_matter_without_keys_on_loopback_and_where_a_list_exists(config: dict[str, Any], enforced: bool) -> None:
    assert (hosts(**config) is not None) == enforced


@each_row(
    "host, allowed",
    [
        ("localhost", True),
        ("LOCALHOST:9000", True),
        ("localhost.", True),
        ("127.0.0.1:8000", True),
        ("127.8.9.1", True),
        ("[::1]:8000", True),
        ("models.example", True),
        ("Models.Example:443", True),
        ("evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example", False),
        ("models.example.evil", False),
        ("localhost@evil.example", False),
        ("10.0.0.1", False),
        ("", False),
        ("localhost:80:80", False),
        ("a b", False),
    ],
)
def test_a_host_is_loopbacks_or_a_listed_one(host: str, allowed: bool) -> None:
    known = hosts(allowed_hosts=["models.example"])
    assert known is not None
    for _ in range(2):
        assert (known.refusal(host.encode(), None) is None) == allowed


@each_row(
    "origin, allowed",
    [
        (None, True),
        ("http://localhost:3000", True),
        ("https://127.0.0.1", True),
        ("http://evil.example", False),
        ("null", False),
        ("http://localhost@evil.example", False),
    ],
)
def test_a_page_is_of_an_allowed_host_too(origin: str | None, allowed: bool) -> None:
    known = hosts()
    assert known is not None
    refusal = known.refusal(b"localhost", None if origin is None else origin.encode())
    assert (refusal is None) == allowed


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RawDeployment]:
    with raw_deployment(tmp_path_factory.mktemp("hosts"), allowed_hosts=None) as strict:
        yield strict


def ask_as(strict: RawDeployment, *headers: str) -> tuple[int, str]:
    lines = ["POST /v1/completions HTTP/1.1", "content-type: application/json", f"content-length: {len(BODY)}"]
    answer = strict.ask("\r\n".join([*lines, *headers, "", ""]).encode() + BODY)
    return answer.status, answer.body.decode()


@each_row("headers", [["host: evil.example"], ["host: localhost", "origin: http://evil.example"]])
def test_a_strange_page_gets_403(strict: RawDeployment, headers: list[str]) -> None:
    status, message = ask_as(strict, *headers)
    assert (status, "proxy.allowed_hosts" in message, "evil.example" in message) == (403, True, True)
    assert strict.engine.seen == []


@each_row(
    "url, host, status",
    [
        ("http://localhost:9/v1/completions", "evil.example", 200),
        ("HTTP://127.0.0.1/v1/completions?x=1", "evil.example", 200),
        ("http://evil.example/v1/completions", "localhost", 403),
        ("http://localhost@evil.example/v1/completions", "localhost", 403),
        ("http:///v1/completions", "localhost", 403),
    ],
)
def test_of_a_target_that_is_a_whole_url_its_own_host_counts(
    strict: RawDeployment, url: str, host: str, status: int
) -> None:
    """RFC 9112, 3.2.2: clients write it that take the server for their proxy (curl -x)."""
    strict.engine.seen.clear()
    answer = strict.ask(post(url, BODY).replace(b"host: proxy", f"host: {host}".encode()))
    assert answer.status == status
    assert [seen.line.split("?")[0].split(" ")[1] for seen in strict.engine.seen] == ["/v1/completions"] * (
        status == 200
    )


def test_a_tunnel_with_another_port_is_served(strict: RawDeployment) -> None:
    assert ask_as(strict, "host: localhost:18000", "origin: http://localhost:18000")[0] == 200
    strict.engine.seen.clear()


# --- web pages of other origins: what browsers are told about them, as the Fetch standard has it


PAGE = "https://chat.example"
COMPLETIONS = "/v1/completions"
ASKED = {"prompt": "hi"}
RAW: dict[str, Any] = {"cors": {"origins": [PAGE]}, "allowed_hosts": ["proxy"]}
"""On loopback and without keys: `allowed_hosts` alone would let no page of another host ask."""
STREAM = head("text/event-stream") + chunk(b'data: {"choices":[]}\n\n') + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
ALLOWED = "access-control-allow-origin"


def told(settings: dict[str, Any], origin: str | None) -> dict[bytes, bytes]:
    request = Request("", Budget(0), tls=False)
    if origin is not None:
        request.headers.append((b"origin", origin.encode()))
    return dict(Cors(CorsSettings.model_validate(settings)).headers(request))


@each_row(
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


def preflight(raw: RawDeployment, origin: str = PAGE, path: str = COMPLETIONS) -> Response:
    lines = [f"OPTIONS {path} HTTP/1.1", "host: proxy", f"origin: {origin}", "access-control-request-method: POST"]
    return raw.ask("\r\n".join([*lines, "access-control-request-headers: authorization, x-mine", "", ""]).encode())


@each_row("path", [COMPLETIONS, "/v1/models", "/v1/responses/resp_1/cancel"])
def test_a_browser_that_asks_first_is_told_what_the_page_may_send(raw: RawDeployment, path: str) -> None:
    answer = preflight(raw, path=path)
    assert (answer.status, answer.body, answer.headers[ALLOWED]) == (204, b"", PAGE)
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-headers"] == "authorization, x-mine"


def test_a_page_that_is_not_named_gets_nothing(raw: RawDeployment) -> None:
    answer = preflight(raw, "https://evil.example")
    assert answer.status == 403
    assert ALLOWED not in answer.headers
    assert raw.ask(post(COMPLETIONS, ASKED, "origin: https://evil.example")).status == 403
    assert raw.engine.seen == []


@each_row("asked", ["stream", "an error", "a page", "no JSON", "a bad head"])
def test_a_page_can_read_every_answer(raw: RawDeployment, asked: str) -> None:
    origin = f"origin: {PAGE}"
    if asked == "stream":
        raw.engine.script = sends(STREAM)
    request, status = {
        "stream": (post(COMPLETIONS, ASKED | {"stream": True}, origin), 200),
        "an error": (post("/v1/nothing", ASKED, origin), 404),
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


def test_a_browser_that_asks_first_needs_no_key(tmp_path: Path) -> None:
    with raw_deployment(tmp_path, cors={"origins": [PAGE]}, auth=keys_file(tmp_path, ("team", "a-key"))) as raw:
        assert preflight(raw).status == 204
        refused = raw.ask(post(COMPLETIONS, ASKED, f"origin: {PAGE}"))
        assert (refused.status, refused.headers[ALLOWED]) == (401, PAGE)
        assert raw.ask(post(COMPLETIONS, ASKED, f"origin: {PAGE}", "authorization: Bearer a-key")).status == 200


def test_without_the_section_no_answer_speaks_of_origins(tmp_path: Path) -> None:
    with raw_deployment(tmp_path, allowed_hosts=["*"]) as raw:
        answer = raw.ask(post(COMPLETIONS, ASKED, f"origin: {PAGE}"))
        assert answer.status == 200
        assert not {"vary", ALLOWED} & answer.headers.keys()
        assert preflight(raw).status == 405
