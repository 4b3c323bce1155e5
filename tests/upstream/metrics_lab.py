"""From the scheduler's step over msgpack to the API server's Prometheus series, with the real classes of both ends."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorStats
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tests.upstream.scheduler_lab import Lab

MODEL = "tiny"


class ApiServer:
    """What PrometheusStatLogger and LoggingStatLogger keep for the connector, with two DP ranks."""

    def __init__(self, config: Any) -> None:
        unregister_vllm_metrics()
        self._prometheus = KVConnectorProm(config, ["model_name", "engine"], {0: [MODEL, "0"], 1: [MODEL, "1"]})
        self._log = KVConnectorLogging(config.kv_transfer_config)
        self.lines: list[str] = []

    def step(self, rank: Lab, engine: int, stats: Any, **report: Any) -> None:
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


def families(prefix: str) -> dict[str, Any]:
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
