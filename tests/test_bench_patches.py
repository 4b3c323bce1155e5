"""The benchmark of the patches runs from end to end. No time is asserted: that is not the business of a test."""

from __future__ import annotations

import pytest

from tests.upstream.run import INSTALLED_VLLM, probe

pytestmark = [pytest.mark.upstream, pytest.mark.full]


def test_every_scenario_runs_patched_and_unpatched() -> None:
    figures = probe(INSTALLED_VLLM, "benchmarks.patches", "--smoke", "--systems", "all", "--json")["figures"]
    assert {figure["scenario"] for figure in figures} == {"prefill", "prefill-pending", "decode", "decode-parked"}
    for figure in figures:
        assert figure["step_us"] > 0
        assert figure["bytecodes"] > 1, "the patches are on one side only"
