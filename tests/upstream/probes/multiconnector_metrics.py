"""From the scheduler's step over msgpack to the API server's Prometheus series, with the real classes of both ends.

Children: two mocks and a MooncakeConnector, whose worker reports a transfer in every step.
"""

from __future__ import annotations

import pickle
from typing import Any

from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.stats import MooncakeKVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorStats
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.version import __version__

from pdserve.installed.distributions import installed
from pdserve.patches import effects
from pdserve.patches.multiconnector.prom_metrics import PATCH
from pdserve.patches.verdict import judge
from tests.upstream.scheduler_lab import Lab, mock, multi

MODEL = "tiny"
PREFIX = "vllm:kv_connector_mc_"


def lab(ours: bool) -> Lab:
    mooncake = {"kv_connector": "MooncakeConnector", "kv_role": "kv_consumer"}
    config = multi(mock("a"), mock("b"), mooncake)
    if ours:
        config["kv_connector_module_path"] = "pdserve.connectors.multi"
    return Lab(connector=config)


class ApiServer:
    """What PrometheusStatLogger and LoggingStatLogger keep for the connector, with two DP ranks."""

    def __init__(self, config: Any) -> None:
        unregister_vllm_metrics()
        self.prometheus = KVConnectorProm(config, ["model_name", "engine"], {0: [MODEL, "0"], 1: [MODEL, "1"]})
        self.log = KVConnectorLogging(config.kv_transfer_config)
        self.lines: list[str] = []

    def receives(self, produced: dict[int, Any], engine: int) -> Any:
        """The outputs of a step as they arrive: encoded and decoded. What was said about the connector."""
        for outputs in produced.values():
            arrived = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(outputs))
            stats = arrived.scheduler_stats.kv_connector_stats if arrived.scheduler_stats else None
            if stats is not None:
                self.prometheus.observe(stats, engine)
                if stats:
                    self.log.observe(stats)
        self.log.log(lambda text, *values: self.lines.append(text % values))

    def series(self) -> dict[str, dict[str, dict[str, float]]]:
        """Of the children: what is measured -> engine -> child -> value, those that are 0 left out."""
        values: dict[str, dict[str, dict[str, float]]] = {}
        for sample in (sample for family in REGISTRY.collect() for sample in family.samples):
            if sample.name.startswith(PREFIX) and not sample.name.endswith("_created"):
                assert sample.labels["model_name"] == MODEL
                engines = values.setdefault(sample.name.removeprefix(PREFIX), {})
                children = engines.setdefault(sample.labels["engine"], {})
                if sample.value:
                    children[sample.labels["connector"]] = sample.value
        return values


def transferred() -> Any:
    """What a worker with a MooncakeConnector reports after a transfer, from its process to the scheduler's."""
    mooncake = MooncakeKVConnectorStats()
    mooncake.record_transfer(0.1, 4096, 1)
    return pickle.loads(pickle.dumps(MultiKVConnectorStats(data={"MooncakeConnector": mooncake})))


def survival() -> str | None:
    """How the API server dies of the first transfer's statistics; None: it does not."""
    under_test = lab(False)
    server = ApiServer(under_test.config)
    under_test.add("r", 32)
    produced = under_test.update(under_test.schedule(), kv_connector_stats=transferred())
    try:
        server.receives(produced, 0)
    except AssertionError as error:
        return str(error)
    return None


def counted() -> Any:
    """Two engines of one API server; a load that arrives, a miss, and in the second one that is aborted meanwhile."""
    ranks = [lab(True), lab(True)]
    server = ApiServer(ranks[0].config)
    series = {"start": server.series()}
    for engine, rank in enumerate(ranks):
        rank.add("r", 64, {"a": {"matched": 48}, "b": {"matched": 32}})
        rank.add("miss", 32)
        if engine == 1:
            rank.add("aborted", 64, {"b": {"matched": 64}})
        _step(rank, server, engine)
    series["loading"] = server.series()
    ranks[1].abort("aborted")
    for engine, rank in enumerate(ranks):
        _step(rank, server, engine)
    series["aborted"] = server.series()
    for engine, rank in enumerate(ranks):
        _step(rank, server, engine, finished_recving={"r", "aborted"} & set(rank.scheduler.requests))
        _step(rank, server, engine)
    return {**series, "end": server.series(), "log": server.lines[0]}


def _step(under_test: Lab, server: ApiServer, engine: int, **report: Any) -> None:
    server.receives(under_test.update(under_test.schedule(), kv_connector_stats=transferred(), **report), engine)


def without_transfers() -> Any:
    """A worker none of whose connectors has statistics: what it says, and what of the scheduler's counts arrives."""
    example = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    results = {}
    for ours in (False, True):
        config = multi(example, example)
        if ours:
            config["kv_connector_module_path"] = "pdserve.connectors.multi"
        under_test = Lab(connector=config, scheduler={"disable_hybrid_kv_cache_manager": True})
        groups = under_test.scheduler.kv_cache_config
        worker = KVConnectorFactory.create_connector(under_test.config, KVConnectorRole.WORKER, groups)
        server = ApiServer(under_test.config)
        under_test.add("r", 32)
        stats = pickle.loads(pickle.dumps(worker.get_kv_connector_stats()))
        server.receives(under_test.update(under_test.schedule(), kv_connector_stats=stats), 0)
        results["ours" if ours else "upstream"] = server.series()
    return results


def measure() -> dict[str, Any]:
    """What upstream does, whether the patch of its crash applies, and what the patched one and our subclass do."""
    results: dict[str, Any] = {"crash": survival(), "verdict": judge(PATCH, versions_here()).outcome}
    if results["verdict"] == "apply":
        PATCH.apply()
        PATCH.apply()
    return {
        **results,
        "patched crash": survival(),
        "dropped": effects.totals().get((PATCH.name, "observations-dropped"), 0),
        "counted": counted(),
        "without transfers": without_transfers(),
    }


def versions_here() -> dict[str, str | None]:
    """With the version whose sources are on the path, not that of the installed distribution."""
    return {**installed(), "vllm": __version__.partition("+")[0]}
