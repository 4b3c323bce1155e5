"""From a worker's statistics to the API server's Prometheus series, with MooncakeConnector alone and in MultiConnector.

Without the patch, then with it. Prints what the pages had; what upstream makes itself is kept.
"""

from __future__ import annotations

import json
import pickle
from typing import Any

from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorProm
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.stats import MooncakeKVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorStats
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from pdserve.patches import effects
from pdserve.patches.mooncake.transfer_metrics import PATCH
from pdserve.patches.multiconnector import prom_metrics
from pdserve.patches.verdict import judge
from tests.upstream.probes.multiconnector_metrics import versions_here
from tests.upstream.scheduler_lab import Lab, mock, multi

PREFIX = "vllm:mooncake_"
MOONCAKE = {"kv_connector": "MooncakeConnector", "kv_role": "kv_producer"}


class ApiServer:
    """What PrometheusStatLogger keeps for the connector of a prefill with two DP ranks, and their schedulers."""

    def __init__(self, *, alone: bool) -> None:
        self._alone = alone
        connector = MOONCAKE if alone else multi(MOONCAKE, mock("a"))
        self._ranks = [Lab(connector=connector), Lab(connector=connector)]
        unregister_vllm_metrics()
        labels = {0: ["tiny", "0"], 1: ["tiny", "1"]}
        self._prometheus = KVConnectorProm(self._ranks[0].config, ["model_name", "engine"], labels)

    def step(self, engine: int, stats: MooncakeKVConnectorStats) -> None:
        """A step of an engine, whose worker reports this; its outputs arrive encoded and decoded."""
        reported = stats if self._alone else MultiKVConnectorStats(data={"MooncakeConnector": stats})
        rank = self._ranks[engine]
        rank.add(f"r{len(rank.outputs)}", 32)
        produced = rank.update(rank.schedule(), kv_connector_stats=pickle.loads(pickle.dumps(reported)))
        for outputs in produced.values():
            arrived = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(outputs))
            seen = arrived.scheduler_stats.kv_connector_stats if arrived.scheduler_stats else None
            if seen is not None:
                self._prometheus.observe(seen, engine)


def families() -> dict[str, Any]:
    """name -> type, help, and the names of its samples with their buckets; without when they were created."""
    return {
        family.name: [
            family.type,
            family.documentation,
            sorted({f"{s.name} {s.labels.get('le', '')}" for s in family.samples if not s.name.endswith("_created")}),
        ]
        for family in REGISTRY.collect()
        if family.name.startswith(PREFIX)
    }


def values() -> dict[str, dict[str, float]]:
    """Of the sums, the counts and the counters: engine -> value."""
    seen: dict[str, dict[str, float]] = {}
    for sample in (sample for family in REGISTRY.collect() for sample in family.samples):
        if sample.name.startswith(PREFIX) and sample.name.endswith(("_sum", "_count", "_total")):
            assert sample.labels["model_name"] == "tiny"
            seen.setdefault(sample.name.removeprefix(PREFIX), {})[sample.labels["engine"]] = sample.value
    return seen


def observed(*, alone: bool) -> dict[str, Any]:
    """Two transfers of the first engine; of the second one more, with a failure of each kind."""
    try:
        server = ApiServer(alone=alone)
        start = values()
        for engine in (0, 1):
            stats = MooncakeKVConnectorStats()
            stats.record_transfer(0.25, 4096, 2)
            stats.record_transfer(0.5, 2**20, 3)
            server.step(engine, stats)
        rare = MooncakeKVConnectorStats()
        rare.record_transfer(2.0, 1024, 1)
        rare.record_failed_transfer()
        rare.record_failed_recv()
        rare.record_failed_recv()
        rare.record_kv_expired_req()
        server.step(1, rare)
    except AssertionError as error:
        return {"died": str(error)}
    return {"died": None, "families": families(), "start": start, "end": values()}


def main() -> None:
    results: dict[str, Any] = {"verdict": judge(PATCH, versions_here()).outcome}
    for when in ("without", "with"):
        if when == "with":
            prom_metrics.PATCH.apply()
            PATCH.apply()
            PATCH.apply()
        results[when] = {"alone": observed(alone=True), "in multi": observed(alone=False)}
    results["dropped"] = effects.totals().get((prom_metrics.PATCH.name, "observations-dropped"), 0)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
