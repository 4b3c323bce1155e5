"""Patch multiconnector-selection: MultiConnector chooses by tokens x load_weight and counts for each child."""

from __future__ import annotations

from pdserve.patches.patch import Patch, PatchTarget

_MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"


def apply() -> None:
    """Nothing: vLLM loads the subclass by the name that the plan gives it."""


PATCH = Patch(
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
    apply=apply,
)
