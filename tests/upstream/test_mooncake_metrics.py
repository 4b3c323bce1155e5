"""What MooncakeConnector counts of its transfers is on /metrics, under upstream's own names, with the real classes."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.upstream.run import VLLM_VERSIONS, probe

pytestmark = pytest.mark.upstream

CORRECTED = "0.33.0"
BEFORE = [version for version in VLLM_VERSIONS if version != CORRECTED]
EVERY_VERSION = pytest.mark.parametrize("version", VLLM_VERSIONS)
EVERYWHERE = pytest.mark.parametrize("where", ["alone", "in multi"])
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


@cache
def measured(version: str) -> Any:
    return probe(version, "tests.upstream.probes.mooncake_metrics")


@pytest.mark.parametrize("version", BEFORE)
def test_nothing_is_exported_before_0_33_unless_patched(version: str) -> None:
    unpatched = measured(version)["without"]
    assert unpatched["alone"] == {"died": None, "families": {}, "start": {}, "end": {}}
    assert "MooncakeConnector is not contained in the list" in unpatched["in multi"]["died"]


@EVERY_VERSION
def test_the_patch_is_for_the_versions_without_metrics(version: str) -> None:
    assert measured(version)["verdict"] == ("not-needed" if version == CORRECTED else "apply")


@EVERYWHERE
@EVERY_VERSION
def test_transfers_and_failures_are_counted_by_engine(version: str, where: str) -> None:
    patched = measured(version)["with"][where]
    assert patched["died"] is None
    assert patched["end"] == SAMPLES


@EVERYWHERE
@EVERY_VERSION
def test_every_series_is_there_from_the_start(version: str, where: str) -> None:
    assert measured(version)["with"][where]["start"] == {name: {"0": 0, "1": 0} for name in SAMPLES}


@EVERYWHERE
@pytest.mark.parametrize("version", BEFORE)
def test_names_types_help_and_buckets_are_those_of_upstream(version: str, where: str) -> None:
    upstream = measured(CORRECTED)["without"][where]["families"]
    assert len(upstream) == 6
    assert measured(version)["with"][where]["families"] == upstream


def test_where_upstream_has_them_they_are_upstreams() -> None:
    """Applied all the same, the patch adds no second family of a name."""
    results = measured(CORRECTED)
    assert results["with"] == results["without"]


@EVERY_VERSION
def test_the_patch_of_the_crash_has_nothing_of_mooncake_to_drop(version: str) -> None:
    assert measured(version)["dropped"] == 0
