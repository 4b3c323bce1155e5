"""A save that ends with the server is reported, whatever happens to a load of the same request."""

from __future__ import annotations

import pytest

from tests.upstream.run import INSTALLED_VLLM, probe

pytestmark = pytest.mark.upstream


def test_a_lost_server_ends_saves_and_loads_each_reported_once() -> None:
    seen, loads = probe(INSTALLED_VLLM, "tests.upstream.probes.lost_send"), ["both", "load"]
    assert seen["unpatched"] == [[[], []], [["save"], loads], [[], []]], "the save of `both` is never reported"
    assert seen["patched"] == [[[], []], [["both", "save"], loads], [[], []]]
