"""A key's best priority binds the proxy's queue and the engines' own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.proxy.deployment import MODEL, Deployment, keys_file
from tests.proxy.rows import each

KEY, BEST = "a-client-key", 5


@pytest.fixture
def keyed(deployment: Deployment, tmp_path: Path) -> Deployment:
    deployment.up(auth=keys_file(tmp_path, ("team", KEY), priority=BEST))
    deployment.proxy.http.headers["authorization"] = f"Bearer {KEY}"
    return deployment


def test_a_body_cannot_ask_for_more(keyed: Deployment) -> None:
    for asked in (-3, 5, 9, "high"):
        assert keyed.complete(priority=asked).status_code == 200
    for fake in keyed.fakes:
        assert [request["body"]["priority"] for request in fake.requests()] == [BEST, 5, 9, BEST]


@each("asked, sent", [("-3", None), ("9", "9"), ("high", None)])
def test_nor_can_a_header(keyed: Deployment, asked: str, sent: str | None) -> None:
    body = {"model": MODEL, "prompt": "hi"}
    assert keyed.proxy.http.post("/v1/completions", json=body, headers={"x-vllm-priority": asked}).status_code == 200
    for fake in keyed.fakes:
        assert fake.requests()[-1]["headers"].get("x-vllm-priority") == sent
