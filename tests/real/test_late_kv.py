"""KV that comes late from prefill: decode answers after the limit, and its blocks are reserved until the KV has come.

On a deployment of its own: with so short a limit other tests would lose loads on a busy machine. In the second circle:
test_lmcache_loads.py has the same patch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.patches.scheduler.load_timeout import NAME
from tests.launch.deployment import Deployment, wait_until
from tests.real.conftest import brought_up, effects
from tests.real.reached import SECONDS, Reached, new_prompt, tokens_of

pytestmark = [pytest.mark.real, pytest.mark.full]

LIMIT = 3.0
BLOCK = 128
"""Tokens, on vLLM's CPU backend."""


@pytest.fixture(scope="module")
def deployment(home: Path) -> Iterator[Deployment]:
    yield from brought_up("tiny-cpu", home, {"decode.load_timeout_seconds": LIMIT})


def wait_for(effect: str, value: float) -> None:
    wait_until(f"{effect} is {value:g}", lambda: effects("decode-0", NAME).get(effect) == value, SECONDS)


async def test_a_decode_whose_kv_does_not_come_computes_and_keeps_the_blocks_for_the_late_kv(reached: Reached) -> None:
    prompt = new_prompt(5 * BLOCK + 20)
    reference = await reached.tokens(prompt, of="prefill-0")
    began = time.monotonic()
    assert tokens_of(await reached.decode("late", prompt)) == reference
    assert LIMIT <= time.monotonic() - began < 10 * LIMIT
    # Six blocks were filled by nobody yet.
    wait_for("quarantined-blocks", 6)
    line = f'pdserve_patch_effects_total{{effect="loads-given-up",patch="{NAME}"}} 1.0'
    assert line in await reached.page("decode-0")

    # Prefill at last: it pushes into the blocks of the request that is long gone.
    assert (await reached.prefill("late", prompt)).status_code == 200
    wait_for("quarantined-blocks", 0)
    assert effects("decode-0", NAME)["late-ends"] == 1

    # The blocks are in use again, and nothing of the late KV is in them.
    for other in (*(new_prompt(6 * BLOCK) for _ in range(4)), prompt):
        assert await reached.tokens(other, of="decode-0") == await reached.tokens(other, of="prefill-0")
