"""vllm-router in place of the proxy, over fake engines: launched, supervised, proven and stopped like any process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.plan.proxy import ROUTER_VERSION
from pdserve.preflight.node_checks import check_router
from tests.launch.deployment import (
    BODY,
    Deployment,
    assert_nothing_left,
    home_in,
    pdserve,
    recipe,
    serving,
    up,
)

pytestmark = pytest.mark.process

MOONCAKE = {"kind": "mooncake", "protocol": "tcp"}


def behind_router(folder: Path, connector: dict[str, Any] = MOONCAKE, **changes: Any) -> Path:
    wanted: dict[str, Any] = {"lmcache": None, "prefill__connector": connector, "decode__connector": connector}
    restart = {"policy": "on-failure", "backoff_seconds": 0.1}
    return recipe(folder, **wanted, proxy__kind="vllm-router", proxy__restart=restart, **changes)


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """What is done to it is undone by the test itself."""
    folder = tmp_path_factory.mktemp("router")
    with home_in(folder) as home:
        with up(behind_router(folder), home) as deployment:
            yield serving(deployment)
        assert_nothing_left(deployment)


def test_the_key_reaches_engines_through_its_environment_alone(router: Deployment) -> None:
    key = router.run.read_key()
    process = router.run.read_plan().process("proxy")
    assert process.env.secrets == {"OPENAI_API_KEY": "engine_key"}
    assert not any(key in word for word in process.argv)
    assert all(key not in path.read_text(errors="replace") for path in router.run.path.rglob("*") if path.is_file())
    assert router.post("/v1/completions", BODY)[0] == 200
    for name in ("prefill-0", "decode-0"):
        http = router.run.read_plan().process(name).ports["http"]
        seen = httpx.get(f"http://127.0.0.1:{http}/fake/requests", trust_env=False).json()
        assert {record["headers"]["authorization"] for record in seen} == {f"Bearer {key}"}
        assert httpx.post(f"http://127.0.0.1:{http}/v1/completions", json=BODY, trust_env=False).status_code == 401


def test_verify_names_the_proof_that_it_cannot_pass(router: Deployment) -> None:
    code, output = pdserve("verify", "--json")
    report, _ = json.JSONDecoder().raw_decode(output[output.index("{") :])
    proofs = {proof["name"]: proof for proof in report["proofs"]}
    statuses = {name: proof["status"] for name, proof in proofs.items()}
    assert statuses.pop("clean") in ("proven", "failed")  # where a client leaves between the legs (docs/vllm-router.md)
    assert statuses.pop("endpoints") == "failed"
    assert statuses == dict.fromkeys(("requests", "transfer", "output"), "proven"), proofs
    assert code == 6
    assert "HTTP 401" in proofs["endpoints"]["reason"]
    assert "they can send requests and cannot list models" in proofs["endpoints"]["reason"]


def test_an_unknown_version_is_refused_before_anything_starts(
    tmp_path: Path, pdserve_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = tmp_path / "packages" / "vllm_router-0.9.0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: vllm-router\nVersion: 0.9.0\n")
    monkeypatch.setenv("PYTHONPATH", str(metadata.parents[1]))
    file = behind_router(tmp_path)
    code, output = pdserve("up", file)
    assert code == 3, output
    assert "proxy.kind: program on " in output
    assert "vllm-router 0.9.0 is installed" in output
    assert f"-m pip install vllm-router=={ROUTER_VERSION}" in output
    check_router(ROUTER_VERSION)
    assert not pdserve_home.exists()
