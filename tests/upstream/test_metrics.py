"""Metrics of transfers with the real classes of both ends: MultiConnector's, each child's, and Mooncake's own."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from pdserve.patches.mooncake.transfer_metrics import PATCH
from pdserve.patches.multiconnector import PROM_METRICS
from tests.upstream.run import IN_RELEASE, VLLM_VERSIONS, count, on, verdict

if IN_RELEASE:
    from prometheus_client import REGISTRY
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.stats import MooncakeKVConnectorStats
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorStats
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    from tests.upstream.scheduler_lab import Lab, mock, multi


CORRECTED = "0.33.0"
PREFIX = "vllm:kv_connector_mc_"
OURS = {"kv_connector_module_path": "pdserve.connectors.multi"}
A, B, MOONCAKE = "MockConnector-0", "MockConnector-1", "MooncakeConnector"


MODEL = "tiny"


class ApiServer:
    """What PrometheusStatLogger and LoggingStatLogger keep for the connector, with two DP ranks."""

    def __init__(self, config: Any) -> None:
        unregister_vllm_metrics()
        self._prometheus = KVConnectorProm(config, ["model_name", "engine"], {0: [MODEL, "0"], 1: [MODEL, "1"]})
        self._log = KVConnectorLogging(config.kv_transfer_config)
        self.lines: list[str] = []

    def step(self, rank: Any, engine: int, stats: Any, **report: Any) -> None:
        """A step of an engine, whose worker reports these statistics; its outputs arrive encoded and decoded."""
        arrived = pickle.loads(pickle.dumps(stats))
        for outputs in rank.update(rank.schedule(), kv_connector_stats=arrived, **report).values():
            decoded = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(outputs))
            seen = decoded.scheduler_stats.kv_connector_stats if decoded.scheduler_stats else None
            if seen is not None:
                self._prometheus.observe(seen, engine)
                if seen:
                    self._log.observe(seen)
        self._log.log(lambda text, *values: self.lines.append(text % values))


def in_multi(stats: Any) -> Any:
    """Return what a worker with a MooncakeConnector below MultiConnector reports."""
    return MultiKVConnectorStats(data={"MooncakeConnector": stats})


def samples(prefix: str) -> Iterator[Any]:
    """Of the families whose names begin so, those that have values."""
    for sample in (sample for family in REGISTRY.collect() for sample in family.samples):
        if sample.name.startswith(prefix) and not sample.name.endswith("_created"):
            assert sample.labels["model_name"] == MODEL
            yield sample


def families_of(prefix: str) -> dict[str, Any]:
    """name -> type, help, and the names of its samples with their buckets; without when they were created."""
    return {
        family.name: [
            family.type,
            family.documentation,
            sorted({f"{s.name} {s.labels.get('le', '')}" for s in family.samples if not s.name.endswith("_created")}),
        ]
        for family in REGISTRY.collect()
        if family.name.startswith(prefix)
    }


def lab(**ours: str) -> Any:
    """Its children are two mocks and a MooncakeConnector, whose worker reports a transfer in every step."""
    mooncake = {"kv_connector": "MooncakeConnector", "kv_role": "kv_consumer"}
    return Lab(connector=multi(mock("a"), mock("b"), mooncake) | ours)


def transferred() -> Any:
    stats = MooncakeKVConnectorStats()
    stats.record_transfer(0.1, 4096, 1)
    return in_multi(stats)


def series() -> dict[str, dict[str, dict[str, float]]]:
    """Of the children: what is measured -> engine -> child -> value, those that are 0 left out."""
    values: dict[str, dict[str, dict[str, float]]] = {}
    for sample in samples(PREFIX):
        engines = values.setdefault(sample.name.removeprefix(PREFIX), {})
        children = engines.setdefault(sample.labels["engine"], {})
        if sample.value:
            children[sample.labels["connector"]] = sample.value
    return values


def first_transfer() -> None:
    rank = lab()
    rank.add("r", 32)
    ApiServer(rank.config).step(rank, 0, transferred())


@on(*VLLM_VERSIONS)
def test_the_api_server_dies_of_the_first_transfers_statistics_unless_patched(version: str) -> None:
    """Since 0.33 upstream skips children without metrics."""
    if version == CORRECTED:
        assert verdict(PROM_METRICS) == "not-needed"
        first_transfer()
        return
    with pytest.raises(AssertionError, match="MooncakeConnector is not contained in the list of registered connectors"):
        first_transfer()
    assert verdict(PROM_METRICS) == "apply"
    PROM_METRICS.apply()
    PROM_METRICS.apply()
    first_transfer()
    assert count(PROM_METRICS.name, "observations-dropped") == 1


@on(*VLLM_VERSIONS)
def test_counts_reach_the_api_server_by_engine_and_child(version: str) -> None:
    """Two engines: a load that arrives and a miss in each, and in the second one a load that is aborted meanwhile. A
    lost choice is neither hit nor miss; a pending load is shown until it arrives or no request waits for it. The last
    counts arrive without statistics of any worker."""
    if version != CORRECTED:
        PROM_METRICS.apply()
    ranks = [lab(**OURS), lab(**OURS)]
    server = ApiServer(ranks[0].config)
    names = {"queries_total", "hits_total", "hit_tokens_total", "misses_total", "pending_loads"}
    assert series() == {name: {"0": {}, "1": {}} for name in names}
    for engine, rank in enumerate(ranks):
        rank.add("r", 64, {"a": {"matched": 48}, "b": {"matched": 32}})
        rank.add("miss", 32)
        if engine == 1:
            rank.add("aborted", 64, {"b": {"matched": 64}})
        server.step(rank, engine, transferred())
    assert series()["pending_loads"] == {"0": {A: 1}, "1": {A: 1, B: 1}}
    ranks[1].abort("aborted")
    for engine, rank in enumerate(ranks):
        server.step(rank, engine, transferred())
    assert series()["pending_loads"] == {"0": {A: 1}, "1": {A: 1}}
    for engine, rank in enumerate(ranks):
        server.step(rank, engine, transferred(), finished_recving={"r", "aborted"} & set(rank.scheduler.requests))
        server.step(rank, engine, None)
    assert series() == {
        "pending_loads": {"0": {}, "1": {}},
        "queries_total": {"0": dict.fromkeys((A, B, MOONCAKE), 2), "1": dict.fromkeys((A, B, MOONCAKE), 3)},
        "hits_total": {"0": {A: 1}, "1": {A: 1, B: 1}},
        "hit_tokens_total": {"0": {A: 48}, "1": {A: 48, B: 64}},
        "misses_total": {"0": {A: 1, B: 1, MOONCAKE: 2}, "1": {A: 2, B: 1, MOONCAKE: 3}},
    }
    assert "MooncakeConnector={" in server.lines[0]
    assert "selection={'queries': {'MockConnector-0': 2" in server.lines[0]


MOONCAKE_PREFIX = "vllm:mooncake_"
MOONCAKE_ALONE = {"kv_connector": "MooncakeConnector", "kv_role": "kv_producer"}
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
    connector = MOONCAKE_ALONE if alone else multi(MOONCAKE_ALONE, mock("a"))
    ranks = [Lab(connector=connector), Lab(connector=connector)]
    server = ApiServer(ranks[0].config)
    start = values()

    def step(engine: int, stats: Any) -> None:
        ranks[engine].add(f"r{len(ranks[engine].outputs)}", 32)
        server.step(ranks[engine], engine, stats if alone else in_multi(stats))

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
    families = families_of(MOONCAKE_PREFIX)
    if families:
        assert start == {name: {"0": 0, "1": 0} for name in SAMPLES}, "every series is there from the start"
        assert values() == SAMPLES
    return families


def values() -> dict[str, dict[str, float]]:
    """Of the sums, the counts and the counters: engine -> value."""
    seen: dict[str, dict[str, float]] = {}
    for sample in samples(MOONCAKE_PREFIX):
        if sample.name.endswith(("_sum", "_count", "_total")):
            seen.setdefault(sample.name.removeprefix(MOONCAKE_PREFIX), {})[sample.labels["engine"]] = sample.value
    return seen
