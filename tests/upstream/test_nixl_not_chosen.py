"""vllm#53049: NIXL reads nothing into the blocks of a request that another child of MultiConnector loads."""

from __future__ import annotations

import pytest

from tests.upstream.run import ALL_VLLM_VERSIONS, probe

pytestmark = pytest.mark.upstream


@pytest.mark.parametrize("version", ALL_VLLM_VERSIONS)
def test_a_child_that_was_not_chosen_writes_to_no_block(version: str) -> None:
    """Of a prompt of eight blocks. It still releases those of prefill."""
    assert probe(version, "tests.upstream.probes.nixl_not_chosen") == {
        "chosen": {"loads_of_the_other": 0, "blocks": 8},
        "not_chosen": {"loads_of_the_other": 1, "blocks": 0},
    }
