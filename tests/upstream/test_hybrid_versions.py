"""On which pairs of vLLM and LMCache KV of several groups survives a connector: the base of plan/engines/hybrid.py."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.errors import PreflightError
from pdserve.installed.versions import Versions
from pdserve.plan.engines.hybrid import check
from tests.plan.kit import on_gpus, recipe, with_lmcache
from tests.plan.test_hybrid import STATE, WINDOWS
from tests.upstream.run import probe

pytestmark = pytest.mark.upstream
INSTALLED_LMCACHE = "0.5.6"
PAIRS = [
    # vllm, lmcache, manager with LMCache, with Mooncake, scheduler takes recurrent state from a connector
    ("0.21.0", None, "off", "off", False),
    ("0.22.1", "0.4.6", "off", "on", False),
    ("0.22.1", "0.4.7", "on", "on", False),
    ("0.24.0", None, "on", "on", True),
    ("0.33.0", None, "on", "on", True),
]


@pytest.mark.parametrize(("vllm", "lmcache", "with_it", "with_mooncake", "state"), PAIRS)
def test_the_versions_that_lose_groups_are_those_that_are_refused(
    vllm: str, lmcache: str | None, with_it: str, with_mooncake: str, state: bool
) -> None:
    seen = probe(vllm, "tests.upstream.probes.hybrid_versions", lmcache=lmcache)
    assert seen["no_connector"] == "on"
    assert (seen["lmcache"], seen["mooncake"], seen["state_can_be_loaded"]) == (with_it, with_mooncake, state)
    assert seen["both"] == with_it, "MultiConnector has the manager where both of its children do"
    versions = Versions(vllm=vllm, lmcache=lmcache or INSTALLED_LMCACHE)
    assert taken(WINDOWS, versions) == (with_it == "on")
    assert taken(STATE, versions) == (with_it == "on" and state)


def taken(config: dict[str, Any], versions: Versions) -> bool:
    try:
        list(check(recipe(on_gpus(), with_lmcache(transfer_mode="lmcache_driven")), config, versions))
    except PreflightError:
        return False
    return True
