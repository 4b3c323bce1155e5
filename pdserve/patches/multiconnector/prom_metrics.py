"""Patch multiconnector-prom-metrics: MultiConnector survives the metrics of a child that registered none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdserve.patches import effects
from pdserve.patches.patch import Patch, PatchTarget
from pdserve.patches.wrap import wrap

_NAME = "multiconnector-prom-metrics"


def apply() -> None:
    """Wraps MultiKVConnectorPromMetrics.observe; matters in the API server, which owns the Prometheus metrics."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector

    wrap(
        multi_connector.MultiKVConnectorPromMetrics,
        "observe",
        patch=_NAME,
        around=_only_registered,
    )


def _only_registered(original: Callable[..., None]) -> Callable[..., None]:
    def observe(self: Any, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        registered = {name: data for name, data in transfer_stats_data.items() if name in self._prom_metrics}
        effects.count(_NAME, "observations-dropped", len(transfer_stats_data) - len(registered))
        original(self, registered, engine_idx)

    return observe


PATCH = Patch(
    name=_NAME,
    behaviour="metrics crash",
    summary=(
        "A child such as MooncakeConnector reports transfer statistics but registers no Prometheus metrics, and "
        "MultiConnector asserts that it did: the API server dies seconds after its first transfer. Statistics of "
        "children without metrics are dropped and counted; --disable-log-stats would cost every vllm: metric."
    ),
    issue="https://github.com/vllm-project/vllm/issues/43828",
    vllm="<0.33",
    targets=(
        PatchTarget(
            "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector.MultiKVConnectorPromMetrics.observe",
            body=True,
        ),
    ),
    runs_in=("api-server",),
    connectors=frozenset({"MultiConnector"}),
    # Both register metrics in every version of the range. Of other children, raw ones among them, that is not known.
    spared=frozenset({"MultiConnector", "NixlConnector", "LMCacheMPConnector"}),
    required=True,
    instead="the transfer connector alone in place of multi, without LMCache or another cache on that role",
    effects={"observations-dropped": "statistics of children without metrics that were dropped"},
    remove_when="vllm 0.33 is the oldest supported version: its observe skips unknown children itself",
    apply=apply,
)
