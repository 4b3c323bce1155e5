"""Patch lmcache-min-load: a reload that is not worth its round trip is computed instead."""

from __future__ import annotations

from pdserve.patches.lmcache.load_cap import TARGETS
from pdserve.patches.patch import Patch


def apply() -> None:
    """Nothing: vLLM loads the subclass by the name that the plan gives it."""


PATCH = Patch(
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
