"""A decode whose KV does not come: it answers after the limit, and its blocks are reserved until the KV has come."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.patches.load_timeout import NAME
from tests.launch.deployment import REPOSITORY, Deployment, assert_nothing_left, pdserve, read_json

pytestmark = pytest.mark.real

LIMIT = 3.0
BLOCK = 128
"""Tokens, on vLLM's CPU backend."""
PROMPT = [3 + token * token % 241 for token in range(5 * BLOCK + 20)]
"""The tiny model knows few tokens."""
TRANSFER = "late-transfer"


class Engines:
    """The engines of a deployment, past its proxy."""

    def __init__(self, deployment: Deployment) -> None:
        plan = deployment.run.read_plan()
        self._urls = {worker.name: worker.url for worker in plan.proxy.workers}
        self._bootstrap = next(worker.bootstrap_url for worker in plan.proxy.workers if worker.bootstrap_url)
        key = {"Authorization": f"Bearer {deployment.run.read_key()}"}
        self._client = httpx.Client(headers=key, timeout=60, trust_env=False)

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def complete(self, name: str, prompt: list[int], max_tokens: int = 12, **more: Any) -> dict[str, Any]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        answer = self._client.post(f"{self._urls[name]}/v1/completions", json={**body, **more})
        assert answer.status_code == 200, answer.text
        answered: dict[str, Any] = answer.json()
        return answered

    def text(self, name: str, prompt: list[int], **more: Any) -> str:
        return str(self.complete(name, prompt, **more)["choices"][0]["text"])

    def pull_params(self) -> dict[str, Any]:
        """Of a decode leg whose prefill leg nobody has sent yet."""
        ranks = self._client.get(f"{self._bootstrap}/query").json()
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": TRANSFER,
            "remote_bootstrap_addr": self._bootstrap,
            "remote_engine_id": ranks["0"]["engine_id"],
        }

    def metrics(self) -> str:
        return self._client.get(f"{self._urls['decode-0']}/metrics").text


def effects() -> dict[str, float]:
    """What the patch in decode says of itself."""
    status = read_json(pdserve("status", "--json")[1])
    counted: dict[str, float] = status["processes"]["decode-0"]["patch_effects"].get(NAME, {})
    return counted


def wait_for(effect: str, value: float) -> None:
    """Until the patch says so; its record is written once a second."""
    deadline = time.monotonic() + 30
    while effects().get(effect) != value:
        assert time.monotonic() < deadline, effects()


@pytest.fixture(scope="module")
def tiny(home: Path) -> Iterator[Deployment]:
    recipe = REPOSITORY / "recipes" / "tiny-cpu.yaml"
    code, output = pdserve("up", recipe, "--set", f"decode.load_timeout_seconds={LIMIT}", "--detach")
    deployment = Deployment(None, home, "tiny-cpu")
    try:
        assert code == 0, output
        yield deployment
    finally:
        pdserve("down", "tiny-cpu")
    assert_nothing_left(deployment)


def test_a_decode_whose_kv_does_not_come_computes_and_keeps_the_blocks_for_the_late_kv(tiny: Deployment) -> None:
    with Engines(tiny) as engines:
        reference = engines.text("prefill-0", PROMPT)
        began = time.monotonic()
        answer = engines.text("decode-0", PROMPT, kv_transfer_params=engines.pull_params())
        took = time.monotonic() - began
        assert answer == reference
        assert LIMIT <= took < 10 * LIMIT
        # 660 tokens: six blocks were filled by nobody yet.
        wait_for("quarantined-blocks", 6)
        assert f'pdserve_patch_effects_total{{effect="loads-given-up",patch="{NAME}"}} 1.0' in engines.metrics()

        # Prefill at last: it pushes into the blocks of the request that is long gone.
        leg = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": TRANSFER}
        engines.complete("prefill-0", PROMPT, max_tokens=1, kv_transfer_params=leg)
        wait_for("quarantined-blocks", 0)
        assert effects()["late-ends"] == 1

        # The blocks are in use again, and nothing of the late KV is in them.
        for factor in (5, 7, 11, 13):
            other = [3 + factor * token * token % 239 for token in range(6 * BLOCK)]
            assert engines.text("decode-0", other) == engines.text("prefill-0", other)
        assert engines.text("decode-0", PROMPT) == reference
