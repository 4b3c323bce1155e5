"""MultiConnector chooses by tokens x load_weight, does not wait for a slow child, and counts what each child did."""

from __future__ import annotations

import importlib

from pdserve.patches.patch import Patch, Target

_MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"


def apply() -> None:
    """Only proves that the subclass can be imported; vLLM loads it by name where the plan says so."""
    importlib.import_module("pdserve.connectors.multi")


PATCH = Patch(
    name="multiconnector-selection",
    behaviour="D",
    summary=(
        "MultiConnector loads from the first child with tokens, however few, and waits as long as any child has no "
        "answer yet. Here tokens x load_weight decide, a pending child holds nobody up (its lookup locks are given "
        "back), choices of an earlier try are dropped, and each child's queries, hits and misses are on /metrics."
    ),
    issue="https://github.com/vllm-project/vllm/pull/38261",
    targets=(
        Target(f"{_MODULE}.MultiConnector.__init__"),
        Target(f"{_MODULE}.MultiConnector.get_num_new_matched_tokens", body=True),
        Target(f"{_MODULE}.MultiConnector.update_state_after_alloc", body=True),
        Target(f"{_MODULE}.MultiConnector._aggregate_request_finished", body=True),
        Target(f"{_MODULE}.MultiConnector.get_kv_connector_stats", body=True),
        Target(f"{_MODULE}.MultiConnector.build_kv_connector_stats", body=True),
        Target(f"{_MODULE}.MultiConnector.build_prom_metrics", body=True),
        Target(f"{_MODULE}.MultiKVConnectorPromMetrics.observe"),
    ),
    runs_in=("api-server", "engine-core", "worker"),
    vehicle="subclass",
    connectors=frozenset({"MultiConnector"}),
    required=False,
    effects={
        "instances": "times that vLLM built the connector: scheduler and workers",
        "chosen-by-weight": "requests loaded from another child than the first one with tokens",
        "pending-lookups-overtaken": "requests loaded from one child while another had no answer yet",
        "lookups-released": "lookups that nobody used whose locks were given back to LMCache",
        "lookups-left-to-expire": "lookups without an answer for a minute: their locks end with LMCache's read TTL",
        "stale-choices-dropped": "choices of an earlier try that no longer held",
    },
    remove_when="upstream weighs its children, answers without waiting for all of them, and counts per child",
    apply=apply,
)
