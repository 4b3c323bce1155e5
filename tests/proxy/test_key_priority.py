"""A key's best priority binds the proxy's queue and the engines' own."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest

from tests.proxy.deployment import MODEL, Deployment

KEY, BEST = "a-client-key", 5


@pytest.fixture
def keyed(deployment: Deployment, tmp_path: Path) -> Deployment:
    line = {"name": "team", "sha256": sha256(KEY.encode()).hexdigest(), "priority": BEST}
    (tmp_path / "keys").write_text(json.dumps(line) + "\n")
    deployment.up(auth={"keys_file": str(tmp_path / "keys")})
    deployment.proxy.http.headers["authorization"] = f"Bearer {KEY}"
    return deployment


@pytest.mark.parametrize(("asked", "sent"), [(-3, BEST), (5, 5), (9, 9), ("high", BEST)])
def test_a_body_cannot_ask_for_more(keyed: Deployment, asked: object, sent: int) -> None:
    keyed.proxy.http.post("/v1/completions", json={"model": MODEL, "prompt": "hi", "priority": asked})
    assert keyed.decodes[0].body()["priority"] == keyed.prefills[0].body()["priority"] == sent


@pytest.mark.parametrize(("asked", "sent"), [("-3", None), ("9", "9"), ("high", None)])
def test_nor_can_a_header(keyed: Deployment, asked: str, sent: str | None) -> None:
    body = {"model": MODEL, "prompt": "hi"}
    assert keyed.proxy.http.post("/v1/completions", json=body, headers={"x-vllm-priority": asked}).status_code == 200
    for fake in keyed.fakes:
        assert fake.requests()[0]["headers"].get("x-vllm-priority") == sent
