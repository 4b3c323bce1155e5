"""Mooncake's transfers at /metrics, with MooncakeConnector alone and in MultiConnector: upstream's since 0.33."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from pdserve.patches.mooncake.transfer_metrics import PATCH
from pdserve.patches.multiconnector import PROM_METRICS
from tests.upstream.run import IN_RELEASE, VLLM_VERSIONS, count, on, verdict

if IN_RELEASE:
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.stats import MooncakeKVConnectorStats

    from tests.upstream import metrics_lab
    from tests.upstream.scheduler_lab import Lab, mock, multi

CORRECTED = "0.33.0"
PREFIX = "vllm:mooncake_"
MOONCAKE = {"kv_connector": "MooncakeConnector", "kv_role": "kv_producer"}
FAMILIES = "c40e7b88f2cbb358"
"""A digest of names, types, help and buckets, as vLLM 0.33 has them."""
SAMPLES = {
    "xfer_time_seconds_sum": {"0": 0.75, "1": 2.75},
    "xfer_time_seconds_count": {"0": 2, "1": 3},
    "bytes_transferred_sum": {"0": 4096 + 2**20, "1": 4096 + 2**20 + 1024},
    "bytes_transferred_count": {"0": 2, "1": 3},
    "num_descriptors_sum": {"0": 5, "1": 6},
    "num_descriptors_count": {"0": 2, "1": 3},
    "num_failed_transfers_total": {"0": 0, "1": 1},
    "num_failed_recvs_total": {"0": 0, "1": 2},
    "num_kv_expired_reqs_total": {"0": 0, "1": 1},
}


@on(*VLLM_VERSIONS)
def test_transfers_and_failures_are_counted_by_engine_with_the_patch_and_since_0_33(version: str) -> None:
    """Where upstream has them, the patch, applied all the same, adds no second family of a name."""
    assert verdict(PATCH) == ("not-needed" if version == CORRECTED else "apply")
    if version == CORRECTED:
        counted_right()
    else:
        assert observed(alone=True) == {}
        with pytest.raises(AssertionError, match="MooncakeConnector is not contained in the list"):
            observed(alone=False)
    for each in (PROM_METRICS, PATCH, PATCH):
        each.apply()
    counted_right()
    assert count(PROM_METRICS.name, "observations-dropped") == 0


def counted_right() -> None:
    for alone in (True, False):
        families = observed(alone=alone)
        assert len(families) == 6
        assert hashlib.sha256(json.dumps(families, sort_keys=True).encode()).hexdigest()[:16] == FAMILIES


def observed(*, alone: bool) -> dict[str, Any]:
    """Two transfers of the first engine; of the second one more, with a failure of each kind. The families."""
    connector = MOONCAKE if alone else multi(MOONCAKE, mock("a"))
    ranks = [Lab(connector=connector), Lab(connector=connector)]
    server = metrics_lab.ApiServer(ranks[0].config)
    start = values()

    def step(engine: int, stats: Any) -> None:
        ranks[engine].add(f"r{len(ranks[engine].outputs)}", 32)
        server.step(ranks[engine], engine, stats if alone else metrics_lab.in_multi(stats))

    for engine in (0, 1):
        stats = MooncakeKVConnectorStats()
        stats.record_transfer(0.25, 4096, 2)
        stats.record_transfer(0.5, 2**20, 3)
        step(engine, stats)
    rare = MooncakeKVConnectorStats()
    rare.record_transfer(2.0, 1024, 1)
    rare.record_failed_transfer()
    rare.record_failed_recv()
    rare.record_failed_recv()
    rare.record_kv_expired_req()
    step(1, rare)
    families = metrics_lab.families(PREFIX)
    if families:
        assert start == {name: {"0": 0, "1": 0} for name in SAMPLES}, "every series is there from the start"
        assert values() == SAMPLES
    return families


def values() -> dict[str, dict[str, float]]:
    """Of the sums, the counts and the counters: engine -> value."""
    seen: dict[str, dict[str, float]] = {}
    for sample in metrics_lab.samples(PREFIX):
        if sample.name.endswith(("_sum", "_count", "_total")):
            seen.setdefault(sample.name.removeprefix(PREFIX), {})[sample.labels["engine"]] = sample.value
    return seen
