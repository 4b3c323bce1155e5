"""LMCache stores what is computed, also where vLLM has computed less of a request than LMCache's lookup has found.

On the real Scheduler and connector. Blocks have contents: a store of a token that is not computed is an error.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.upstream.run import VLLM_VERSIONS, probe

WORKLOADS = 60
PROMPT = 600
pytestmark = pytest.mark.upstream


@cache
def measured(version: str) -> Any:
    return probe(version, "tests.upstream.probes.lmcache_computed_count", str(WORKLOADS))


@pytest.fixture(params=VLLM_VERSIONS)
def seen(request: pytest.FixtureRequest) -> Any:
    return measured(request.param)


@pytest.mark.parametrize("case", ["behind a local prefix", "running neighbour"])
def test_after_a_failed_load_upstream_stores_a_chunk_whose_last_block_is_computed_in_part(seen: Any, case: str) -> None:
    assert seen["unpatched"][case]["wrong"].startswith("stores at ")
    patched = seen["patched"][case]
    assert (patched["done"], patched["locked"]) == (True, 0)
    assert patched["stored"] >= PROMPT // 64 * 64 - 256, "what is computed is stored all the same"


def test_a_hit_that_vllm_does_not_use_is_not_counted_as_computed(seen: Any) -> None:
    assert "wrong" not in seen["patched"]["unused hit"]


def test_random_workloads_with_failed_loads_store_no_wrong_chunk(seen: Any) -> None:
    assert any("stores at" in wrong for wrong in seen["unpatched"]["random"]["wrong"])
    assert seen["patched"]["random"]["wrong"] == []
    assert seen["lowered"] > 0
