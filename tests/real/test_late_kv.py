"""KV that comes late, and reports of it that come too late or twice: a running decode answers right and lives on.

A decode whose KV does not come answers after the limit, and its blocks are reserved until the KV has come.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from pdserve.patches.scheduler import stale_completions
from pdserve.patches.scheduler.load_timeout import NAME
from tests.launch.deployment import REPOSITORY, Deployment, assert_nothing_left, pdserve, read_json
from tests.real import kv_faults

pytestmark = [pytest.mark.real, pytest.mark.full]

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
        self._client = httpx.Client(headers=key, timeout=120, trust_env=False)

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

    def stream(self, name: str, prompt: list[int], max_tokens: int, **more: Any) -> Iterator[str]:
        """The texts of the events of an answer, as they come."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        url = f"{self._urls[name]}/v1/completions"
        with self._client.stream("POST", url, json={**body, **more, "stream": True}) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    yield event["choices"][0]["text"]

    def push_params(self, transfer: str) -> dict[str, Any]:
        return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}

    def pull_params(self, transfer: str = TRANSFER) -> dict[str, Any]:
        ranks = self._client.get(f"{self._bootstrap}/query").json()
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": transfer,
            "remote_bootstrap_addr": self._bootstrap,
            "remote_engine_id": ranks["0"]["engine_id"],
        }

    def metrics(self) -> str:
        return self._client.get(f"{self._urls['decode-0']}/metrics").text


def effects(patch: str = NAME) -> dict[str, float]:
    """What a patch in decode says of itself."""
    status = read_json(pdserve("status", "--json")[1])
    counted: dict[str, float] = status["processes"]["decode-0"]["patch_effects"].get(patch, {})
    return counted


def wait_for(effect: str, value: float, patch: str = NAME) -> None:
    """Until the patch says so; its record is written once a second."""
    deadline = time.monotonic() + 120
    while effects(patch).get(effect) != value:
        assert time.monotonic() < deadline, effects(patch)


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a test tells decode which fault to have."""
    return tmp_path_factory.mktemp("faults") / "orders"


@pytest.fixture(scope="module")
def tiny(home: Path, faults: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    recipe = tmp_path_factory.mktemp("recipe") / "tiny-cpu.yaml"
    document = {
        "extends": str(REPOSITORY / "recipes" / "tiny-cpu.yaml"),
        "name": "tiny-cpu",
        "decode": {"load_timeout_seconds": LIMIT, "env": kv_faults.installed(faults)},
    }
    recipe.write_text(yaml.safe_dump(document))
    code, output = pdserve("up", recipe, "--detach")
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
        engines.complete("prefill-0", PROMPT, max_tokens=1, kv_transfer_params=engines.push_params(TRANSFER))
        wait_for("quarantined-blocks", 0)
        assert effects()["late-ends"] == 1

        # The blocks are in use again, and nothing of the late KV is in them.
        for factor in (5, 7, 11, 13):
            other = [3 + factor * token * token % 239 for token in range(6 * BLOCK)]
            assert engines.text("decode-0", other) == engines.text("prefill-0", other)
        assert engines.text("decode-0", PROMPT) == reference


@pytest.mark.parametrize(("transfers", "kind"), [("finished_recving", "loads"), ("finished_sending", "sends")])
def test_reports_of_transfers_that_come_late_or_twice_are_counted_and_harm_no_request(
    tiny: Deployment, faults: Path, transfers: str, kind: str
) -> None:
    long, name, notice = 400, f"reported-twice-{kind}", faults / kv_faults.NOTICE
    with Engines(tiny) as engines:
        reference = engines.text("prefill-0", PROMPT, max_tokens=long)
        engines.complete("prefill-0", PROMPT, max_tokens=1, kv_transfer_params=engines.push_params(name))
        text, notified, after = "", False, 0
        for piece in engines.stream("decode-0", PROMPT, long, kv_transfer_params=engines.pull_params(name)):
            text += piece
            if not notified:
                notice.with_suffix(".new").write_text(transfers)
                notice.with_suffix(".new").rename(notice)
                notified = True
            elif not notice.exists():
                after += 1
        assert after > 1, "the report did not come while the request was running"
        assert text == reference
        wait_for(f"{kind}-of-gone-requests", 1, stale_completions.PATCH.name)
        wait_for(f"{kind}-of-live-requests", 1, stale_completions.PATCH.name)
        assert engines.text("decode-0", PROMPT) == engines.text("prefill-0", PROMPT)
    assert read_json(pdserve("status", "--json")[1])["phase"] == "ready"
