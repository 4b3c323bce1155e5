"""Patches of what LMCacheMPConnector reloads: a cap, a minimum, and read locks that are given back."""

from __future__ import annotations

from pdserve.patches.patch import Patch, PatchTarget

_CONNECTOR = "lmcache.integration.vllm.lmcache_mp_connector.LMCacheMPConnector"

TARGETS = tuple(
    PatchTarget(f"{_CONNECTOR}.{method}", body=body)
    for method, body in (
        ("__init__", False),
        ("get_num_new_matched_tokens", True),
        ("update_state_after_alloc", True),
        ("request_finished", False),
        ("build_connector_meta", False),
    )
)
"""The methods of LMCacheMPConnector that the subclass overrides or relies on."""


def apply() -> None:
    """Do nothing: vLLM loads the subclass by the name that the plan gives it."""


LOAD_CAP = Patch(
    name="lmcache-load-cap",
    behaviour="reloads from LMCache",
    summary=(
        "LMCache reloads as much of a prompt as it has, in one go. With max_tokens_per_load a request takes that many "
        "tokens at most, in whole chunks, and computes the rest: vLLM does not ask again after a load. The read locks "
        "of what is left are given back once. It cures no deadlock: vLLM reserves blocks."
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


MIN_LOAD = Patch(
    name="lmcache-min-load",
    behaviour="reloads from LMCache",
    summary=(
        "LMCacheMPConnector reloads a single chunk as readily as a whole prompt, and the request leaves the batch for "
        "it. With min_load_tokens a smaller reload is not done: its tokens are computed, and every read lock of its "
        "lookup is given back."
    ),
    issue="https://github.com/ROCm/ATOM/pull/1026",
    targets=TARGETS,
    runs_in=("engine-core",),
    vehicle="subclass",
    connectors=frozenset({"LMCacheMPConnector"}),
    settings=frozenset({"min_load_tokens"}),
    required=False,
    effects={
        "instances": "times that vLLM built the connector with a minimum: scheduler and workers",
        "loads-skipped": "reloads below the minimum",
        "tokens-left-to-recompute": "tokens that LMCache had and that were computed instead",
    },
    remove_when="LMCacheMPConnector has a minimum of its own",
    apply=apply,
)


LOOKUP_LOCKS = Patch(
    name="lmcache-lookup-locks",
    behaviour="reloads from LMCache",
    summary=(
        "A lookup locks all that it finds in LMCache. Of a request that ends before it has blocks (a client that "
        "leaves a queue) upstream ends the session alone, and every chunk of the hit stays locked, and cannot be "
        "evicted, for LMCache's read TTL. Here those locks are given back, once the lookup is answered."
    ),
    issue="https://github.com/vllm-project/vllm/issues/44100",
    targets=TARGETS,
    runs_in=("engine-core",),
    vehicle="subclass",
    connectors=frozenset({"LMCacheMPConnector"}),
    required=False,
    effects={
        "instances": "times that vLLM built the connector: scheduler and workers",
        "lookups-released": "lookups of requests that ended before they had blocks, whose locks were given back",
        "lookups-left-to-expire": "lookups without an answer for a minute: their locks end with LMCache's read TTL",
    },
    remove_when="LMCacheMPConnector gives back the locks of a request that ends before it has blocks",
    apply=apply,
)
