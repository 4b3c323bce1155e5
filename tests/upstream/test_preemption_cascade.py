"""Two plain requests that preempt each other for ever (vllm#49674): in the releases that the plan warns of.

By overlapping steps beside a connector that can load; no transfer takes part, and nothing of ours changes it.
"""

from __future__ import annotations

import pytest

from pdserve.installed.versions import Versions
from pdserve.plan.versions import check_known, features
from tests.upstream.run import ALL_VLLM_VERSIONS, probe

pytestmark = pytest.mark.upstream


@pytest.mark.parametrize("version", ALL_VLLM_VERSIONS)
def test_the_releases_that_do_it_are_those_that_are_warned_of(version: str) -> None:
    used = features(role="decode", platform="cpu", connectors=frozenset({"NixlConnector"}), per_tp_rank=False)
    warned = any("vllm#49674" in warning for warning in check_known([used], Versions(vllm=version)))
    assert probe(version, "tests.upstream.probes.preemption_cascade") == warned
    assert warned == ("0.27" <= version < "0.30")
