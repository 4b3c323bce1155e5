"""A block for drafts that vLLM moves is in one place for LMCache too (lmcache#4984): since 0.5.6, without a patch."""

from __future__ import annotations

import pytest

from tests.upstream.run import INSTALLED_VLLM, probe

pytestmark = pytest.mark.upstream


@pytest.mark.parametrize(("lmcache", "right"), [("0.5.5", False), ("0.5.6", True)])
def test_a_moved_block_is_stored_as_a_state_by_0_5_5_and_not_by_0_5_6(lmcache: str, right: bool) -> None:
    """What is in two places is taken for the state of the first one, which no kernel has written."""
    seen = probe(INSTALLED_VLLM, "tests.upstream.probes.lmcache_drafts", lmcache=lmcache)
    assert all(one["blocks_in_two_places"] == 0 for one in seen) is right
