"""Patch lmcache-lookup-locks: a request that ends before it has blocks gives its read locks back."""

from __future__ import annotations

from pdserve.patches.lmcache.load_cap import TARGETS
from pdserve.patches.patch import Patch


def apply() -> None:
    """Nothing: vLLM loads the subclass by the name that the plan gives it."""


PATCH = Patch(
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
