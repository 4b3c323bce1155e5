"""A prefill whose ranks do not start at once: the first one has the bootstrap server of all."""

from __future__ import annotations

import pytest
from packaging.specifiers import SpecifierSet

from pdserve.patches.mooncake.late_bootstrap import PATCH
from tests.upstream.run import VLLM_VERSIONS, probe

pytestmark = pytest.mark.upstream

VERSIONS = tuple(SpecifierSet(PATCH.vllm).filter(VLLM_VERSIONS))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_worker_waits_for_a_first_rank_that_is_minutes_late_unless_unpatched(version: str) -> None:
    seen = probe(version, "tests.upstream.probes.mooncake_late_bootstrap")
    assert seen["verdict"] == "apply"
    unpatched, patched = seen["unpatched"], seen["patched"]
    assert unpatched["in time"]["error"] is None
    assert "after 3 attempts" in unpatched["late"]["error"]
    assert patched["in time"] == unpatched["in time"]
    assert patched["late"] == {"error": None, "pauses": 30, "known": [1], "longest": 10.0}
