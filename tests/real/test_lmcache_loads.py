"""Reloads from LMCache on the real stack: bounded by a cap and a minimum, and one that hangs."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from pdserve.plan.process import HttpProbe
from tests.launch.deployment import REPOSITORY, Deployment, assert_nothing_left, pdserve, read_json
from tests.real import kv_faults

pytestmark = pytest.mark.real

CAP, LEAST, CHUNK, BLOCK = 512, 300, 256, 128
LIMIT = 10.0
"""Seconds after which a load is given up; those that nothing holds take far less."""
NAME = "tiny-cpu-lmcache-loads"
WAIT_SECONDS = 120.0
"""For what is counted or released a little after an answer."""


@dataclass(frozen=True)
class Stack:
    deployment: Deployment
    engine: str
    lmcache: str
    faults: Path

    def ask(self, prompt: list[int]) -> list[str]:
        """The tokens of a greedy answer."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 0}
        answer = (
            httpx.post(f"{self.deployment.state().endpoint}/v1/completions", json=body, timeout=120)
            .raise_for_status()
            .json()
        )
        tokens: list[str] = answer["choices"][0]["logprobs"]["tokens"]
        return tokens

    def loaded(self) -> int:
        """Tokens that came from LMCache since the start."""
        text = httpx.get(f"{self.engine}/metrics", timeout=60).text
        source = re.search(r'^vllm:prompt_tokens_by_source_total\{[^}]*"external_kv_transfer"[^}]*\} (\S+)', text, re.M)
        return int(float(source.group(1))) if source else 0

    def l1(self) -> dict[str, Any]:
        status = httpx.get(f"{self.lmcache}/status", timeout=60).json()
        l1_manager: dict[str, Any] = status["storage_manager"]["l1_manager"]
        return l1_manager

    def stored(self) -> int:
        """Chunks that can be loaded; one that is still being written cannot."""
        l1 = self.l1()
        return int(l1["total_object_count"]) - int(l1["staging_object_count"])

    def forget_locally(self) -> None:
        """Empties the engine's own cache; LMCache keeps what it has."""
        reset = f"{self.engine}/reset_prefix_cache?reset_external=false"
        await_(lambda: httpx.post(reset, timeout=60).json().get("success") is True)

    def effects(self) -> dict[str, dict[str, float]]:
        _, output = pdserve("status", NAME, "--json")
        patch_effects: dict[str, dict[str, float]] = read_json(output)["processes"]["aggregated-0"]["patch_effects"]
        return patch_effects


def await_(fact: Any) -> None:
    """Polls until something is so; a limit, not a measurement."""
    until = time.monotonic() + WAIT_SECONDS
    while not fact():
        assert time.monotonic() < until, "it does not become so"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def stack(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    recipe = tmp_path_factory.mktemp("recipe") / f"{NAME}.yaml"
    connector = {"kind": "lmcache-mp", "max_tokens_per_load": CAP, "min_load_tokens": LEAST}
    faults = tmp_path_factory.mktemp("faults") / "orders"
    document = {
        "extends": str(REPOSITORY / "recipes" / "tiny-cpu-lmcache.yaml"),
        "name": NAME,
        "aggregated": {
            "connector": connector,
            "load_timeout_seconds": LIMIT,
            "env": kv_faults.installed(faults),
        },
    }
    recipe.write_text(yaml.safe_dump(document))
    code, output = pdserve("up", recipe, "--detach")
    deployment = Deployment(None, home, NAME)
    try:
        assert code == 0, output
        plan = deployment.run.read_plan()
        probe = plan.process("aggregated-0").probe
        assert isinstance(probe, HttpProbe)
        yield Stack(deployment, f"http://{probe.host}:{probe.port}", plan.lmcache[0].http_url, faults)
    finally:
        pdserve("down", NAME)
    assert_nothing_left(deployment)


def prompt(tokens: int, seed: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(10, 250) for _ in range(tokens)]


def test_a_stored_prompt_is_reloaded_up_to_the_cap_and_answered_as_before(stack: Stack) -> None:
    asked = prompt(1800, 1)
    before = stack.effects().get("lmcache-load-cap", {})
    objects = stack.stored()
    reference = stack.ask(asked)
    await_(lambda: stack.stored() >= objects + 1800 // CHUNK)
    stack.forget_locally()
    loaded = stack.loaded()
    again = stack.ask(asked)
    await_(lambda: stack.loaded() > loaded)
    assert stack.loaded() - loaded == CAP
    assert again == reference
    # Shown a moment later. 1792 tokens are stored in whole chunks: what was left beyond the cap.
    capped, left = before.get("loads-capped", 0) + 1, before.get("tokens-left-to-recompute", 0)
    await_(lambda: stack.effects().get("lmcache-load-cap", {}).get("loads-capped", 0) >= capped)
    left += 1800 // CHUNK * CHUNK - CAP
    assert stack.effects()["lmcache-load-cap"]["tokens-left-to-recompute"] >= left
    await_(lambda: stack.l1()["read_locked_count"] == 0)


def test_a_reload_below_the_minimum_is_computed_and_answered_as_before(stack: Stack) -> None:
    asked = prompt(290, 2)
    before = stack.effects().get("lmcache-min-load", {})
    objects = stack.stored()
    reference = stack.ask(asked)
    await_(lambda: stack.stored() > objects)
    stack.forget_locally()
    loaded = stack.loaded()
    again = stack.ask(asked)
    assert again == reference
    skipped = before.get("loads-skipped", 0) + 1
    await_(lambda: stack.effects().get("lmcache-min-load", {}).get("loads-skipped", 0) >= skipped)
    left = stack.effects()["lmcache-min-load"]["tokens-left-to-recompute"] - before.get("tokens-left-to-recompute", 0)
    assert left >= CHUNK
    assert stack.loaded() == loaded
    await_(lambda: stack.l1()["read_locked_count"] == 0)


def test_every_patch_of_these_settings_is_active_in_every_process(stack: Stack) -> None:
    _, output = pdserve("status", NAME, "--json")
    reported = read_json(output)["processes"]["aggregated-0"]["patch_processes"]
    assert sorted(record["kind"] for record in reported) == ["api-server", "engine-core"]
    for record in reported:
        assert {"lmcache-load-cap", "lmcache-min-load", "load-timeout", "lmcache-lost-send"} <= set(record["active"])


def test_a_reload_that_hangs_is_given_up_and_its_blocks_wait_for_it(stack: Stack) -> None:
    asked = prompt(1800, 3)
    objects = stack.stored()
    reference = stack.ask(asked)
    await_(lambda: stack.stored() >= objects + 1800 // CHUNK)
    stack.forget_locally()
    hold = stack.faults / kv_faults.HOLD_LOADS
    hold.touch()
    began = time.monotonic()
    assert stack.ask(asked) == reference
    assert time.monotonic() - began >= LIMIT
    await_(lambda: stack.effects().get("load-timeout") == {"loads-given-up": 1, "quarantined-blocks": CAP // BLOCK})

    # Now it begins, into the blocks that the request no longer has.
    hold.unlink()
    await_(lambda: stack.effects()["load-timeout"].get("late-ends") == 1)
    await_(lambda: stack.effects()["load-timeout"]["quarantined-blocks"] == 0)
    await_(lambda: stack.l1()["read_locked_count"] == 0)
    # The blocks are in use again, and nothing of the late KV is in them.
    assert stack.ask(asked) == reference
    for seed in (4, 5, 6):
        other = prompt(1800, seed)
        first = stack.ask(other)
        stack.forget_locally()
        assert stack.ask(other) == first
