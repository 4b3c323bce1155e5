"""The series of MooncakeConnector's transfers on /metrics. Apart from their patch, because it imports vLLM.

They are named as vllm 0.33 names them (vllm#50374). The histograms have samples on prefill, which writes the KV;
failures are counted where they are noticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

_HISTOGRAMS: Mapping[str, tuple[str, str, tuple[float, ...]]] = {
    "transfer_duration": (
        "xfer_time_seconds",
        "Histogram of transfer duration for Mooncake KV Cache transfers.",
        (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0),
    ),
    "bytes_transferred": (
        "bytes_transferred",
        "Histogram of bytes transferred per Mooncake KV Cache transfer.",
        tuple(2**power for power in range(11, 35, 2)),
    ),
    "num_descriptors": (
        "num_descriptors",
        "Histogram of number of descriptors per Mooncake KV Cache transfer.",
        (10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10000, 20000, 50000),
    ),
}
"""Key of MooncakeKVConnectorStats -> name, help and buckets as in 0.33: a dashboard made for it fits."""
_COUNTERS: Mapping[str, str] = {
    "num_failed_transfers": "Number of failed Mooncake KV Cache transfers.",
    "num_failed_recvs": "Number of failed Mooncake KV Cache receives.",
    "num_kv_expired_reqs": (
        "Number of requests that had their KV expire. NOTE: This metric is tracked on the P instance."
    ),
}
"""Key of MooncakeKVConnectorStats, which is the name too -> help."""


class TransferSeries(KVConnectorPromMetrics):  # type: ignore[misc]  # vllm is not there when types are checked
    """Every series exists from the start, at 0, for every DP rank of this API server."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[type, Any],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        def of_each_engine(family: Any) -> dict[int, Any]:
            return {engine: family.labels(*values) for engine, values in per_engine_labelvalues.items()}

        # Counters and histograms of several API servers are added up; no mode for that need be given.
        self._histograms = {
            key: of_each_engine(
                metric_types[Histogram](
                    name=f"vllm:mooncake_{name}", documentation=text, buckets=buckets, labelnames=labelnames
                )
            )
            for key, (name, text, buckets) in _HISTOGRAMS.items()
        }
        self._counters = {
            key: of_each_engine(
                metric_types[Counter](name=f"vllm:mooncake_{key}", documentation=text, labelnames=labelnames)
            )
            for key, text in _COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Count what transfers have reported. A key that is not there counts nothing: an error here would end the API
        server, as vllm#43828 does."""
        for key, histograms in self._histograms.items():
            for value in transfer_stats_data.get(key, ()):
                histograms[engine_idx].observe(value)
        for key, counters in self._counters.items():
            # A list of ones; each call would be one for prometheus_client.
            if events := sum(transfer_stats_data.get(key, ())):
                counters[engine_idx].inc(events)
