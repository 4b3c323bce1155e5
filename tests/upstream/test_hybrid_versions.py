"""On every supported vLLM KV of several groups survives a connector: the base of plan/engines/hybrid.py.

That older ones lose groups, and are refused for it, is in tests/plan/test_hybrid.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.errors import PreflightError
from pdserve.installed.versions import Versions
from pdserve.plan.engines.hybrid import check
from tests.plan.kit import on_gpus, recipe, with_lmcache
from tests.plan.test_hybrid import STATE, WINDOWS
from tests.upstream.run import VLLM_VERSIONS, probe

pytestmark = pytest.mark.upstream
INSTALLED_LMCACHE = "0.5.6"


@pytest.mark.parametrize("version", VLLM_VERSIONS)
def test_every_supported_pair_keeps_all_groups_and_is_taken(version: str) -> None:
    seen = probe(version, "tests.upstream.probes.hybrid_versions")
    managers = {case: seen[case] for case in ("no_connector", "lmcache", "mooncake", "both")}
    assert set(managers.values()) == {"on"}, managers
    assert seen["state_can_be_loaded"]
    versions = Versions(vllm=version, lmcache=INSTALLED_LMCACHE)
    assert taken(WINDOWS, versions)
    assert taken(STATE, versions)


def taken(config: dict[str, Any], versions: Versions) -> bool:
    try:
        list(check(recipe(on_gpus(), with_lmcache(transfer_mode="lmcache_driven")), config, versions))
    except PreflightError:
        return False
    return True
