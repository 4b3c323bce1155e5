"""Patch moriio-unread-prompts: decode computes a prompt whose KV it does not read."""

from __future__ import annotations

from pdserve.patches.patch import Patch, PatchTarget

NAME = "moriio-unread-prompts"
COMPUTED = "prompts-computed"
"""What it counts."""
_CLASS = "vllm.distributed.kv_transfer.kv_connector.v1.moriio.moriio_connector.MoRIIOConnector"

_READ = ">=0.32,<0.34"
"""Whose code was read. Recipes with the connector are refused on any vllm but 0.32 (known.py)."""


def apply() -> None:
    """Do nothing: vLLM loads the subclass by the name that the plan gives it."""


PATCH = Patch(
    name=NAME,
    behaviour="failed and late loads",
    summary=(
        "In READ mode a decode takes every prompt for one whose KV it reads, without a look at the request: one that "
        "names no KV (n above 1, a canary), and one that is resumed after a preemption, is answered from blocks that "
        "nobody wrote; 0.33 looks whether it asks for a remote prefill, and not whether it names blocks and an engine. "
        "Here only a request that names KV is read for; any other one is computed."
    ),
    issue="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/distributed/kv_transfer/kv_connector/v1/moriio",
    vllm=_READ,
    targets=(
        PatchTarget(f"{_CLASS}.__init__", only=_READ),
        PatchTarget(f"{_CLASS}.get_num_new_matched_tokens", body=True, only=_READ),
        PatchTarget(f"{_CLASS}Scheduler.get_num_new_matched_tokens", body=True, only=_READ),
        PatchTarget(f"{_CLASS}Scheduler.update_state_after_alloc", body=True, only=_READ),
    ),
    runs_in=("engine-core",),
    vehicle="subclass",
    connectors=frozenset({"MoRIIOConnector"}),
    required=True,
    instead="kind: nixl or kind: mooncake",
    effects={
        "instances": "times that vLLM built the connector: scheduler and workers",
        COMPUTED: "prompts that named no KV to read, or no longer, and were computed by decode",
    },
    remove_when="MoRIIOConnector in READ mode counts a prompt as read only if its request names blocks and an engine",
    apply=apply,
)
