"""NIXL's push mode on the real stack: prefill writes KV into decode's memory, and every end of a request frees both."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.launch.deployment import REPOSITORY, Deployment, pdserve, read_json
from tests.real import kv_faults
from tests.real.conftest import brought_up, member
from tests.real.nixl_engines import API_BODIES, WORDS, Engines, assert_all_proven

pytestmark = [pytest.mark.real, pytest.mark.full]

NAME = "tiny-cpu-nixl-push"
DEPARTURES = 6
WHOLE = "/v1/responses"
"""Its requests go to one engine."""
CONNECTOR = {"kind": "nixl-push", "accept_open_cases": True, "lease_seconds": 20}
"""The proxy asks each life of prefill for one token, whose block is kept for a lease."""
RESTART = {"policy": "on-failure", "backoff_seconds": 0.1}


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults") / "orders"


@pytest.fixture(scope="module")
def tiny(home: Path, faults: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    recipe = tmp_path_factory.mktemp("recipe") / f"{NAME}.yaml"
    document = {
        "extends": str(REPOSITORY / "recipes" / "tiny-cpu-nixl.yaml"),
        "name": NAME,
        "prefill": {"connector": CONNECTOR, "restart": RESTART, "env": kv_faults.installed(faults)},
        "decode": {"connector": CONNECTOR},
    }
    recipe.write_text(yaml.safe_dump(document))
    yield from brought_up(NAME, home, recipe)


@pytest.fixture
def engines(tiny: Deployment) -> Engines:
    return Engines(tiny)


def effects(name: str) -> dict[str, int]:
    """What the patch has counted in an engine."""
    status = read_json(pdserve("status", "--json")[1])
    counted: dict[str, int] = status["processes"][name]["patch_effects"].get("nixl-push", {})
    return counted


def test_every_proof_is_proven(tiny: Deployment) -> None:
    assert_all_proven()


@pytest.mark.parametrize("path", API_BODIES)
def test_with_each_api_but_one_decode_gets_kv_that_prefill_wrote(engines: Engines, path: str) -> None:
    written, computed = engines.prompt_tokens_of(path)
    if path == WHOLE:
        assert (written, computed >= 128) == (0, True)
    else:
        assert written >= 128
        assert computed <= 1


def test_clients_that_leave_at_any_moment_leave_no_block_behind(engines: Engines) -> None:
    """While prefill computes, while it writes, while decode answers."""

    async def depart() -> None:
        prompt = WORDS * 30
        for number in range(DEPARTURES):
            body = {"prompt": f"{prompt}{number}", "max_tokens": 200, "stream": number % 2 == 0}
            await engines.leave(body | {"cache_salt": f"leaves-{number}"}, 0.05 * 2**number)
            while any(await engines.used()):
                pass

    asyncio.run(depart())


def test_decode_has_its_blocks_again_after_prefill_was_killed_and_serves_with_its_next_life(
    tiny: Deployment, engines: Engines, faults: Path
) -> None:
    core = member(tiny, "prefill-0", "VLLM::EngineCor")

    async def killed() -> int:
        async with httpx.AsyncClient(timeout=240, trust_env=False) as client:
            body: dict[str, Any] = {"model": "tiny", "prompt": WORDS * 30, "max_tokens": 4, "cache_salt": "killed"}
            with kv_faults.held(faults / kv_faults.HOLD_STEPS):
                asked = asyncio.ensure_future(client.post(f"{engines.endpoint}/v1/completions", json=body))
                while not engines.metric("decode-0", "vllm:num_requests_waiting"):
                    await asyncio.sleep(0.05)
                tiny.fault("prefill-0", core, signal.SIGKILL)
                answer = await asked
            tiny.wait_for("ready", after="degraded", name="prefill-0")
            while any(await engines.used()):
                pass
            again = await client.post(f"{engines.endpoint}/v1/completions", json=body)
            assert again.status_code == 200, again.text
            return answer.status_code

    assert asyncio.run(killed()) >= 500
    assert effects("decode-0").get("registrations-orphaned", 0) >= 1
    assert engines.tokens("external_kv_transfer") > 0
