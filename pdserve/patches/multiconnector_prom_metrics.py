"""MultiConnector must survive the metrics of a child that registered none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from pdserve.patches.patch import Patch
from pdserve.patches.wrap import wrap

_NAME = "multiconnector-prom-metrics"
_SIGNATURE = "(self, transfer_stats_data, engine_idx=0)"

dropped: Counter[str] = Counter()
"""Observations that were left out in this process, by connector."""


def apply() -> None:
    """Wraps MultiKVConnectorPromMetrics.observe; matters in the API server, which owns the Prometheus metrics."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector

    wrap(
        multi_connector.MultiKVConnectorPromMetrics,
        "observe",
        patch=_NAME,
        signatures={_SIGNATURE},
        around=_only_registered,
    )


def _only_registered(original: Callable[..., None]) -> Callable[..., None]:
    def observe(self: Any, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        registered = {name: data for name, data in transfer_stats_data.items() if name in self._prom_metrics}
        dropped.update(transfer_stats_data.keys() - registered.keys())
        original(self, registered, engine_idx)

    return observe


PATCH = Patch(
    name=_NAME,
    summary=(
        "MooncakeConnector reports transfer statistics but registers no Prometheus metrics, and MultiConnector asserts "
        "that it did: the API server dies seconds after its first transfer. Statistics of children without metrics are "
        "dropped and counted; --disable-log-stats would avoid the crash at the price of every vllm: metric."
    ),
    issue="https://github.com/vllm-project/vllm/issues/43828",
    vllm="<0.33",
    targets=("vllm.distributed.kv_transfer.kv_connector.v1.multi_connector.MultiKVConnectorPromMetrics.observe",),
    runs_in=("api-server",),
    connectors=frozenset({"MultiConnector", "MooncakeConnector"}),
    platforms=("cpu", "cuda", "rocm"),
    required=True,
    remove_when="vllm 0.33 is the oldest supported version: its observe skips unknown children itself",
    apply=apply,
)
