"""A proxy that asks its clients for TLS and a key comes up, is proven, and is restarted like any other."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.pd.limits import keys
from tests.launch.deployment import pdserve, recipe, up
from tests.proxy.test_tls import made

pytestmark = pytest.mark.process

BODY = {"model": "fake", "prompt": "hi", "max_tokens": 2}


@pytest.fixture
def key_file(tmp_path: Path) -> tuple[str, Path]:
    key, line = keys.new("team-a")
    file = tmp_path / "keys.jsonl"
    file.write_text(line + "\n")
    return key, file


def test_with_tls_and_keys(tmp_path: Path, pdserve_home: Path, key_file: tuple[str, Path]) -> None:
    pair = made(tmp_path, "front")
    key, file = key_file
    settings: dict[str, Any] = {
        "proxy__tls": {"certificate": str(pair.certificate), "key": str(pair.key)},
        "proxy__auth": {"keys_file": str(file)},
    }
    with up(recipe(tmp_path, **settings), pdserve_home) as deployment:
        deployment.command.expect("serving fake at https://127.0.0.1:")
        context = ssl.create_default_context(cafile=str(pair.certificate))
        with httpx.Client(verify=context, trust_env=False, base_url=str(deployment.state().endpoint)) as client:
            assert client.post("/v1/completions", json=BODY).status_code == 401
            bearer = {"Authorization": f"Bearer {key}"}
            assert client.post("/v1/completions", json=BODY, headers=bearer).status_code == 200
        root = deployment.id_of("proxy")
        assert pdserve("restart", "proxy") == (0, "proxy is ready")
        assert (deployment.id_of("proxy"), len(deployment.events("rolled"))) == (root, 1)
        # It waits until decode has no request left, which it asks the proxy.
        assert pdserve("restart", "decode-0") == (0, "decode-0 is ready")


def test_engines_that_see_the_clients_own_authorization_see_the_launchers(tmp_path: Path, pdserve_home: Path) -> None:
    with up(recipe(tmp_path, proxy__auth={"client_authorization": "forward"}), pdserve_home) as deployment:
        deployment.command.expect("serving fake at")
