"""How many pulls a decode worker can have open, on the real connector: libzmq's 1,023 sockets are no limit."""

from __future__ import annotations

import pytest

from tests.upstream.run import INSTALLED_VLLM, probe

pytestmark = pytest.mark.upstream


def test_more_pulls_can_be_open_with_the_patches_than_without() -> None:
    results = probe(INSTALLED_VLLM, "tests.upstream.probes.mooncake_many_pulls")
    unpatched, patched = results["unpatched"], results["patched"]
    assert unpatched["open"] < unpatched["pulls"], "the others failed: no socket was left for them"
    assert (patched["open"], patched["asked"]) == (patched["pulls"], patched["pulls"]), "each with sockets of its own"
