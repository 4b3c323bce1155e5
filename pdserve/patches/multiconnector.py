"""Patches of MultiConnector.

multiconnector-prom-metrics: it survives the metrics of a child that registered none.
multiconnector-selection: it chooses by tokens x load_weight and counts for each child.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdserve.patches import effects
from pdserve.patches.patch import Patch, PatchTarget, wrap

_METRICS_NAME = "multiconnector-prom-metrics"


def _apply_prom_metrics() -> None:
    """Wraps MultiKVConnectorPromMetrics.observe; matters in the API server, which owns the Prometheus metrics."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector

    wrap(
        multi_connector.MultiKVConnectorPromMetrics,
        "observe",
        patch=_METRICS_NAME,
        around=_drop_unregistered,
    )


def _drop_unregistered(original: Callable[..., None]) -> Callable[..., None]:
    def observe(self: Any, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        registered = {name: data for name, data in transfer_stats_data.items() if name in self._prom_metrics}
        effects.count(_METRICS_NAME, "observations-dropped", len(transfer_stats_data) - len(registered))
        original(self, registered, engine_idx)

    return observe


PROM_METRICS = Patch(
    name=_METRICS_NAME,
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
    apply=_apply_prom_metrics,
)


_MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"


def _apply_selection() -> None:
    """Do nothing: vLLM loads the subclass by the name that the plan gives it."""


SELECTION = Patch(
    name="multiconnector-selection",
    behaviour="choice of connector",
    summary=(
        "MultiConnector loads from the first child with tokens, however few, and waits as long as any child has no "
        "answer yet. Here tokens x load_weight decide, a pending child delays no load (its lookup locks are given "
        "back), choices of an earlier try are dropped, and each child's queries, hits and misses are on /metrics."
    ),
    issue="https://github.com/vllm-project/vllm/pull/38261",
    targets=(
        PatchTarget(f"{_MODULE}.MultiConnector.__init__"),
        PatchTarget(f"{_MODULE}.MultiConnector.get_num_new_matched_tokens", body=True),
        PatchTarget(f"{_MODULE}.MultiConnector.update_state_after_alloc", body=True),
        PatchTarget(f"{_MODULE}.MultiConnector._aggregate_request_finished", body=True),
        PatchTarget(f"{_MODULE}.MultiConnector.get_kv_connector_stats", body=True),
        PatchTarget(f"{_MODULE}.MultiConnector.build_kv_connector_stats", body=True),
        PatchTarget(f"{_MODULE}.MultiConnector.build_prom_metrics", body=True),
        PatchTarget(f"{_MODULE}.MultiKVConnectorPromMetrics.observe"),
    ),
    runs_in=("api-server", "engine-core", "worker"),
    vehicle="subclass",
    connectors=frozenset({"MultiConnector"}),
    required=False,
    effects={
        "instances": "times that vLLM built the connector: scheduler and workers",
        "chosen-by-weight": "requests loaded from another child than the first one with tokens",
        "pending-lookups-overtaken": "requests loaded from one child while another had no answer yet",
        "lookups-released": "unused lookups whose locks were given back to LMCache",
        "lookups-left-to-expire": "lookups without an answer for a minute: their locks end with LMCache's read TTL",
        "stale-choices-dropped": "choices of an earlier try that no longer held",
    },
    remove_when="upstream weighs its children, answers without waiting for all of them, and counts per child",
    apply=_apply_selection,
)
