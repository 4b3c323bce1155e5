"""One run of the probe of that name for each upstream version, shared by the tests that read its facts."""

from __future__ import annotations

from functools import cache
from typing import Any

from tests.upstream.run import ALL_VLLM_VERSIONS, probe

WORKLOADS = 15
OURS = ("load_timeout", "ready_waiters_first", "failed_group")


@cache
def facts(version: str) -> dict[str, Any]:
    """probe -> "unpatched" or "patched" -> case -> what was seen.

    The guard against stale completions wraps the same path. It is applied first on every second version, else last.
    """
    guard_first = ALL_VLLM_VERSIONS.index(version) % 2 == 0
    return run(version, ("stale_completions", *OURS) if guard_first else (*OURS, "stale_completions"))


def run(version: str, patches: tuple[str, ...], workloads: int = WORKLOADS) -> dict[str, Any]:
    """With these patches, in this order."""
    module, seed = "tests.upstream.probes.waiting_loads", "1"
    answer: dict[str, Any] = probe(version, module, version, ",".join(patches), str(workloads), seed)
    return answer
