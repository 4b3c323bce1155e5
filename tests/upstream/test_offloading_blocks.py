"""A store of OffloadingConnector is waited for before a load of another child writes to its blocks, or it stores KV of
another prompt. On the real Scheduler and MultiConnector."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.upstream.run import ALL_VLLM_VERSIONS, probe

pytestmark = [pytest.mark.upstream, pytest.mark.parametrize("version", ALL_VLLM_VERSIONS)]
CORRECTED = "0.33"
SAFE = {"freed_before_its_store_ended": True, "stores": 1, "loads": ["loads"], "waited_for": True}


@cache
def seen(version: str) -> dict[str, Any]:
    results: dict[str, Any] = probe(version, "tests.upstream.probes.offloading_blocks")
    return results


def test_upstream_does_not_wait_for_it_before_0_33(version: str) -> None:
    assert seen(version)["unpatched"] == SAFE | {"waited_for": version >= CORRECTED}


def test_the_patch_does(version: str) -> None:
    """Of 128 tokens in blocks of 16: the first request's when it is computed, and those that the second one loads into.
    Where upstream is right, there is nothing to apply."""
    if version >= CORRECTED:
        assert "patched" not in seen(version)
    else:
        patched = dict(seen(version)["patched"])
        assert patched.pop("noted") > 0
        assert patched == SAFE
