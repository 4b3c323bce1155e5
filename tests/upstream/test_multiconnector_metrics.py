"""MultiConnector's metrics with the real classes of both ends: it survives Mooncake's, and each child has its own."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from pdserve.patches.multiconnector import PROM_METRICS
from tests.upstream.run import IN_RELEASE, VLLM_VERSIONS, count, on, verdict

if IN_RELEASE:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.stats import MooncakeKVConnectorStats

    from tests.upstream import metrics_lab
    from tests.upstream.scheduler_lab import Lab, mock, multi

CORRECTED = "0.33.0"
PREFIX = "vllm:kv_connector_mc_"
OURS = {"kv_connector_module_path": "pdserve.connectors.multi"}
A, B, MOONCAKE = "MockConnector-0", "MockConnector-1", "MooncakeConnector"


def lab(**ours: str) -> Any:
    """Its children are two mocks and a MooncakeConnector, whose worker reports a transfer in every step."""
    mooncake = {"kv_connector": "MooncakeConnector", "kv_role": "kv_consumer"}
    return Lab(connector=multi(mock("a"), mock("b"), mooncake) | ours)


def transferred() -> Any:
    stats = MooncakeKVConnectorStats()
    stats.record_transfer(0.1, 4096, 1)
    return metrics_lab.in_multi(stats)


def series() -> dict[str, dict[str, dict[str, float]]]:
    """Of the children: what is measured -> engine -> child -> value, those that are 0 left out."""
    values: dict[str, dict[str, dict[str, float]]] = {}
    for sample in metrics_lab.samples(PREFIX):
        engines = values.setdefault(sample.name.removeprefix(PREFIX), {})
        children = engines.setdefault(sample.labels["engine"], {})
        if sample.value:
            children[sample.labels["connector"]] = sample.value
    return values


def first_transfer() -> None:
    rank = lab()
    rank.add("r", 32)
    metrics_lab.ApiServer(rank.config).step(rank, 0, transferred())


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
    lost choice is neither hit nor miss; a pending load is shown until it arrives or no request waits for it."""
    if version != CORRECTED:
        PROM_METRICS.apply()
    ranks = [lab(**OURS), lab(**OURS)]
    server = metrics_lab.ApiServer(ranks[0].config)
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
        server.step(rank, engine, transferred())
    assert series() == {
        "pending_loads": {"0": {}, "1": {}},
        "queries_total": {"0": dict.fromkeys((A, B, MOONCAKE), 2), "1": dict.fromkeys((A, B, MOONCAKE), 3)},
        "hits_total": {"0": {A: 1}, "1": {A: 1, B: 1}},
        "hit_tokens_total": {"0": {A: 48}, "1": {A: 48, B: 64}},
        "misses_total": {"0": {A: 1, B: 1, MOONCAKE: 2}, "1": {A: 2, B: 1, MOONCAKE: 3}},
    }
    assert "MooncakeConnector={" in server.lines[0]
    assert "selection={'queries': {'MockConnector-0': 2" in server.lines[0]


@on(*VLLM_VERSIONS)
def test_they_arrive_without_statistics_of_any_worker() -> None:
    example = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    seen = []
    for ours in ({}, OURS):
        rank = Lab(connector=multi(example, example) | ours, scheduler={"disable_hybrid_kv_cache_manager": True})
        groups = rank.scheduler.kv_cache_config
        worker = KVConnectorFactory.create_connector(rank.config, KVConnectorRole.WORKER, groups)
        server = metrics_lab.ApiServer(rank.config)
        rank.add("r", 32)
        server.step(rank, 0, pickle.loads(pickle.dumps(worker.get_kv_connector_stats())))
        seen.append(series())
    assert seen[0] == {}
    children = {"ExampleConnector-0": 1, "ExampleConnector-1": 1}
    assert seen[1]["queries_total"]["0"] == seen[1]["misses_total"]["0"] == children
