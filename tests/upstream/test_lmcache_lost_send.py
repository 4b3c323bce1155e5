"""A save that ends with the server is reported, whatever happens to a load of the same request."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.upstream.run import INSTALLED_VLLM, probe

pytestmark = pytest.mark.upstream
LMCACHE = ("0.4.5", "0.5.4", None)


@cache
def seen(lmcache: str | None) -> dict[str, Any]:
    found: dict[str, Any] = probe(INSTALLED_VLLM, "tests.upstream.probes.lost_send", lmcache=lmcache)
    return found


@pytest.mark.parametrize("lmcache", LMCACHE)
def test_a_lost_server_ends_saves_and_loads_each_reported_once(lmcache: str | None) -> None:
    loads = ["both", "load"]
    assert seen(lmcache)["unpatched"] == [[[], []], [["save"], loads], [[], []]], "the save of `both` is never reported"
    assert seen(lmcache)["patched"] == [[[], []], [["both", "save"], loads], [[], []]]
