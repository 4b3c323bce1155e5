"""A block for drafts that vLLM moves is in one place for LMCache too (lmcache#4984), without a patch."""

from __future__ import annotations

import pytest

from tests.upstream.run import INSTALLED_VLLM, probe

pytestmark = pytest.mark.upstream


def test_a_moved_block_is_in_one_place() -> None:
    """What is in two places is taken for the state of the first one, which no kernel has written: lmcache 0.5.5."""
    seen = probe(INSTALLED_VLLM, "tests.upstream.probes.lmcache_drafts")
    assert len(seen) == 3
    assert all(workload["blocks_in_two_places"] == 0 for workload in seen)
