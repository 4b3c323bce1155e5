"""Patch mooncake-prom-metrics: what MooncakeConnector counts of its transfers is on the engine's /metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdserve.patches.patch import Patch, PatchTarget, wrap

NAME = "mooncake-prom-metrics"
_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"


def apply() -> None:
    """Gives MooncakeConnector the class method that other connectors have, alone or as a child of MultiConnector.

    Matters in the API server, which owns the Prometheus metrics. Statistics come to it already: upstream collects them
    in the workers and writes them into its log.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector

    wrap(mooncake_connector.MooncakeConnector, "build_prom_metrics", patch=NAME, around=_with_series)


def _with_series(original: Callable[..., Any]) -> Callable[..., Any]:
    # `original` is bound to MooncakeConnector; vLLM calls the method on classes only.
    def build_prom_metrics(
        vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> Any:
        theirs = original(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        if theirs is not None:  # two families of the same name would end the API server
            return theirs
        from pdserve.patches.mooncake.transfer_series import TransferSeries

        return TransferSeries(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    return build_prom_metrics


PATCH = Patch(
    name=NAME,
    behaviour="metrics of transfers",
    summary=(
        "MooncakeConnector's workers count bytes, seconds and failures of their transfers, and no version before 0.33 "
        "exports them: they are in the log alone, every ten seconds. Here they are on /metrics, with the names and "
        "buckets of 0.33 (vllm:mooncake_bytes_transferred, vllm:mooncake_xfer_time_seconds, ...)."
    ),
    issue="https://github.com/vllm-project/vllm/pull/50374",
    vllm="<0.33",
    targets=(
        PatchTarget(f"{_V1}.base.KVConnectorBase_V1.build_prom_metrics", body=True),
        PatchTarget(f"{_V1}.metrics.KVConnectorPromMetrics.__init__"),
        PatchTarget(f"{_V1}.mooncake.stats.MooncakeKVConnectorStats.reset", body=True),
        PatchTarget(f"{_V1}.mooncake.mooncake_connector.MooncakeConnector"),
    ),
    runs_in=("api-server",),
    connectors=frozenset({"MooncakeConnector"}),
    required=False,
    remove_when="vllm 0.33 is the oldest supported version: its MooncakeConnector has metrics of its own",
    apply=apply,
)
