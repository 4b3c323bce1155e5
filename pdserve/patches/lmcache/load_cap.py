"""One request must not take more from LMCache at once than the recipe allows."""

from __future__ import annotations

from pdserve.errors import StartError
from pdserve.patches.patch import Patch, Target
from pdserve.patches.record import is_active

_NAME = "lmcache-load-cap"
_GATE = "admission-gate"
_INSIDE_VLLM = "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_mp_connector"
_LMCACHE = "lmcache.integration.vllm.lmcache_mp_connector"

TARGETS = tuple(
    Target(f"{module}.LMCacheMPConnector.{method}", body=body, only=only)
    for module, only in ((_LMCACHE, ">=0.4.7"), (_INSIDE_VLLM, "<0.22"))
    for method, body in (
        ("__init__", False),
        ("get_num_new_matched_tokens", True),
        ("update_state_after_alloc", True),
        ("request_finished", False),
        ("build_connector_meta", False),
    )
)
"""Of lmcache's class, and of the one inside vLLM that vllm 0.21 uses."""


def apply() -> None:
    """Nothing but a check: vLLM loads the subclass by name where the plan says so. Raises StartError."""
    from vllm.v1.core.sched.scheduler import Scheduler

    # vllm#44560 (0.23) reserves the blocks that loads in flight still need.
    if not hasattr(Scheduler, "_inflight_prefill_reserved_blocks") and not is_active(_GATE):
        raise StartError(
            f"patch {_NAME} needs the patch {_GATE} on vllm before 0.23: a capped load leaves more to compute while "
            "its blocks are held, and that scheduler then deadlocks more often than without a cap"
        )


PATCH = Patch(
    name=_NAME,
    behaviour="C",
    summary=(
        "LMCache reloads as much of a prompt as it has, in one go. With max_tokens_per_load a request takes that many "
        "tokens at most, in whole chunks, and computes the rest: vLLM does not ask again after a load. The read locks "
        "of what is left are given back once. No cure for a deadlock, and not needed as one from vllm 0.23 on."
    ),
    issue="https://github.com/LMCache/LMCache/pull/3382",
    targets=TARGETS,
    runs_in=("engine-core",),
    vehicle="subclass",
    connectors=frozenset({"LMCacheMPConnector"}),
    settings=frozenset({"max_tokens_per_load"}),
    required=False,
    effects={
        "instances": "times that vLLM built the connector with a cap: scheduler and workers",
        "loads-capped": "reloads that took less than LMCache had",
        "tokens-left-to-recompute": "tokens that LMCache had and that were computed instead",
    },
    remove_when="LMCacheMPConnector has a cap of its own, as LMCacheConnectorV1 has lmcache.max_tokens_per_load",
    apply=apply,
)
