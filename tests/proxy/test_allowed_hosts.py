"""A proxy on loopback without API keys answers its own machine, and no web page that a user of it has opened."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pdserve.pd.config.proxy import ProxyConfig
from pdserve.pd.limits.allowed_hosts import AllowedHosts
from tests.proxy.raw import RawDeployment, post, raw_deployment
from tests.proxy.rows import each

CONFIG: dict[str, Any] = {
    "host": "127.0.0.1",
    "port": 8000,
    "served_name": "tiny",
    "protocol": "aggregated",
    "workers": [],
    "request_timeout_seconds": 60,
    "connect_timeout_seconds": 5,
    "drain_seconds": 5,
    "max_body_bytes": 1000,
}
BODY = b'{"prompt": "hi"}'


def hosts(**config: Any) -> AllowedHosts | None:
    return AllowedHosts.of(ProxyConfig.model_validate(CONFIG | config))


@each(
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


@each(
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


@each(
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
def raw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RawDeployment]:
    with raw_deployment(tmp_path_factory.mktemp("hosts"), allowed_hosts=None) as raw:
        yield raw


def ask(raw: RawDeployment, *headers: str) -> tuple[int, str]:
    lines = ["POST /v1/completions HTTP/1.1", "content-type: application/json", f"content-length: {len(BODY)}"]
    answer = raw.ask("\r\n".join([*lines, *headers, "", ""]).encode() + BODY)
    return answer.status, answer.body.decode()


@pytest.mark.process
@each("headers", [["host: evil.example"], ["host: localhost", "origin: http://evil.example"]])
def test_a_strange_page_gets_403_with_how_to_allow_it_and_no_engine_hears_of_it(
    raw: RawDeployment, headers: list[str]
) -> None:
    status, message = ask(raw, *headers)
    assert (status, "proxy.allowed_hosts" in message, "evil.example" in message) == (403, True, True)
    assert raw.engine.seen == []


@pytest.mark.process
@each(
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
    raw: RawDeployment, url: str, host: str, status: int
) -> None:
    """RFC 9112, 3.2.2: clients write it that take the server for their proxy (curl -x)."""
    raw.engine.seen.clear()
    answer = raw.ask(post(url, BODY).replace(b"host: proxy", f"host: {host}".encode()))
    assert answer.status == status
    assert [seen.line.split("?")[0].split(" ")[1] for seen in raw.engine.seen] == ["/v1/completions"] * (status == 200)


@pytest.mark.process
def test_a_tunnel_with_another_port_is_served(raw: RawDeployment) -> None:
    assert ask(raw, "host: localhost:18000", "origin: http://localhost:18000")[0] == 200
    raw.engine.seen.clear()
