"""The aggregated mode on the real stack: one vLLM with LMCache behind the same proxy, whose reloads are bounded by a
cap and a minimum, and one that hangs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.deployment import Deployment
from tests.real import kv_faults
from tests.real.conftest import assert_proven, brought_up, effects, status_of_all
from tests.real.reached import Reached, new_prompt, until

pytestmark = pytest.mark.real

CAP, LEAST, CHUNK, BLOCK = 512, 300, 256, 128
LIMIT = 10.0
"""Seconds after which a load is given up; those that nothing holds take far less."""
ENGINE = "aggregated-0"
CAPPED, SKIPPED, TIMED_OUT = "lmcache-load-cap", "lmcache-min-load", "load-timeout"


@pytest.fixture(scope="module")
def deployment(home: Path, faults: Path) -> Iterator[Deployment]:
    settings = {
        "aggregated.connector": {"kind": "lmcache-mp", "max_tokens_per_load": CAP, "min_load_tokens": LEAST},
        "aggregated.load_timeout_seconds": LIMIT,
        "aggregated.env": kv_faults.installed(faults),
    }
    yield from brought_up("tiny-cpu-lmcache", home, settings)


def test_every_proof_that_applies_is_proven(tiny: Deployment) -> None:
    """Nothing is transferred: such a claim would be empty."""
    assert_proven("endpoints", "requests", "stored", "output", "reload", "clean")


def test_every_patch_of_these_settings_is_active_in_every_process(tiny: Deployment) -> None:
    _, status = status_of_all()
    reported = status["processes"][ENGINE]["patch_processes"]
    assert sorted(record["kind"] for record in reported) == ["api-server", "engine-core"]
    for record in reported:
        assert {CAPPED, SKIPPED, TIMED_OUT, "lmcache-lost-send"} <= set(record["active"])


async def kept(reached: Reached, prompt: list[int]) -> list[int]:
    """Return the answer to a prompt that LMCache has in whole chunks from now on, and the engine has not."""
    wanted = await reached.stored() + len(prompt) // CHUNK
    answer = await reached.tokens(prompt)

    async def stored() -> bool:
        return await reached.stored() >= wanted

    await until("its chunks are stored", stored)
    await reached.forget(ENGINE)
    return answer


async def shown(patch: str, effect: str, least: float) -> None:
    """Wait until a patch shows so much of an effect."""

    async def enough() -> bool:
        return effects(ENGINE, patch).get(effect, 0) >= least

    await until(f"{effect} of {patch}", enough)


async def test_a_stored_prompt_is_reloaded_up_to_the_cap_and_answered_as_before(reached: Reached) -> None:
    prompt, before = new_prompt(1800), effects(ENGINE, CAPPED)
    reference = await kept(reached, prompt)
    loaded = await reached.prompt_tokens(ENGINE, "external_kv_transfer")
    assert await reached.tokens(prompt) == reference

    async def counted() -> bool:
        return await reached.prompt_tokens(ENGINE, "external_kv_transfer") == loaded + CAP

    await until("tokens were loaded up to the cap", counted)
    await shown(CAPPED, "loads-capped", before.get("loads-capped", 0) + 1)
    # 1792 tokens are stored in whole chunks: what was left beyond the cap.
    left = before.get("tokens-left-to-recompute", 0) + 1800 // CHUNK * CHUNK - CAP
    assert effects(ENGINE, CAPPED)["tokens-left-to-recompute"] >= left
    await until("no lock is left", reached.unlocked)


async def test_a_reload_below_the_minimum_is_computed_and_answered_as_before(reached: Reached) -> None:
    prompt, before = new_prompt(290), effects(ENGINE, SKIPPED)
    reference = await kept(reached, prompt)
    loaded = await reached.prompt_tokens(ENGINE, "external_kv_transfer")
    assert await reached.tokens(prompt) == reference
    await shown(SKIPPED, "loads-skipped", before.get("loads-skipped", 0) + 1)
    left = effects(ENGINE, SKIPPED)["tokens-left-to-recompute"] - before.get("tokens-left-to-recompute", 0)
    assert left >= CHUNK
    assert await reached.prompt_tokens(ENGINE, "external_kv_transfer") == loaded
    await until("no lock is left", reached.unlocked)


async def test_a_reload_that_hangs_is_given_up_and_its_blocks_wait_for_it(reached: Reached, faults: Path) -> None:
    prompt = new_prompt(1800)
    reference = await kept(reached, prompt)
    with kv_faults.held(faults / kv_faults.HOLD_LOADS):
        began = time.monotonic()
        assert await reached.tokens(prompt) == reference
        assert time.monotonic() - began >= LIMIT
        await shown(TIMED_OUT, "quarantined-blocks", CAP // BLOCK)
        assert effects(ENGINE, TIMED_OUT) == {"loads-given-up": 1, "quarantined-blocks": CAP // BLOCK}

    # Now it begins, into the blocks that the request no longer has.
    await shown(TIMED_OUT, "late-ends", 1)

    async def free() -> bool:
        return effects(ENGINE, TIMED_OUT)["quarantined-blocks"] == 0

    await until("the blocks are free", free)
    await until("no lock is left", reached.unlocked)
    # They are in use again, and nothing of the late KV is in them.
    assert await reached.tokens(prompt) == reference
    for _ in range(3):
        other = new_prompt(1800)
        first = await reached.tokens(other)
        await reached.forget(ENGINE)
        assert await reached.tokens(other) == first
