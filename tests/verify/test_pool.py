"""What `verify` proves of KV that engines keep without LMCache: a Mooncake store, and vLLM's own offloading."""

from __future__ import annotations

import pytest

from pdserve.verify import Proof, Report
from tests.verify.deployment import Deployment

pytestmark = pytest.mark.process

STORE, OFFLOAD = "MooncakeStoreConnector", "OffloadingConnector"


def proof(report: Report, name: str) -> Proof:
    (wanted,) = [entry for entry in report.proofs if entry.name == name]
    return wanted


def test_a_store_is_proven_by_what_its_engines_stored_and_loaded(deployment: Deployment) -> None:
    report = deployment.up(cached=False, beside=STORE).verify()
    assert report.exit_code == 0, report
    assert [entry.name for entry in report.proofs] == [
        *("endpoints", "requests", "transfer", "pool-stored", "output", "pool-reload", "clean")
    ]
    # Two prompts of 619 tokens, in the fake's blocks of 256.
    stored, reloaded = proof(report, "pool-stored").numbers, proof(report, "pool-reload").numbers
    assert (stored["blocks expected"], stored["keys stored"], stored["keys failed"]) == (4, 4, 0)
    assert (reloaded["tokens loaded"], reloaded["keys loaded"], reloaded["same tokens"]) == (512, 2, True)


def test_a_store_that_takes_nothing_is_a_failure(deployment: Deployment) -> None:
    report = deployment.up(cached=False, beside=STORE, faults={"prefill": {"store_fails": 1}}).verify()
    assert proof(report, "pool-stored").status == "failed"
    assert "0 keys were stored and 4 failed; see logs/prefill-0" in proof(report, "pool-stored").reason
    assert proof(report, "pool-reload").status == "failed"
    assert "was computed again instead of being reloaded" in proof(report, "pool-reload").reason


def test_without_the_endpoint_that_clears_caches_a_reload_is_not_proven(deployment: Deployment) -> None:
    report = deployment.up(cached=False, beside=STORE, cache_reset_endpoint=False).verify()
    assert proof(report, "pool-stored").status == "proven"
    assert proof(report, "pool-reload").status == "not-proven"


def test_offloading_is_proven_by_its_reload(deployment: Deployment) -> None:
    report = deployment.up(aggregated=1, cached=False, beside=OFFLOAD).verify()
    assert report.exit_code == 0, report
    numbers = proof(report, "offload-reload").numbers
    assert (numbers["tokens loaded"], numbers["same tokens"]) == (512, True)
