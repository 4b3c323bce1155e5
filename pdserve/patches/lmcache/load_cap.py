"""Patch lmcache-load-cap: a request takes no more from LMCache at once than the recipe allows."""

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
    """Nothing: vLLM loads the subclass by the name that the plan gives it."""


PATCH = Patch(
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
