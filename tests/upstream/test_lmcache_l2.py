"""Files of LMCache's L2 that a failed store has left (lmcache#4991): none is loaded, and servers that stage apart leave
none. On LMCache's own adapters and storage manager."""

from __future__ import annotations

import tempfile
from functools import cache
from typing import Any

import pytest

from tests.upstream.run import INSTALLED_VLLM, probe

pytestmark = pytest.mark.upstream


@cache
def seen() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        results: dict[str, Any] = probe(INSTALLED_VLLM, "tests.upstream.probes.lmcache_l2", folder)
    return results


@pytest.mark.parametrize("kind", ["fs", "fs_native"])
def test_a_cut_file_is_no_hit_and_its_bytes_reach_no_request(kind: str) -> None:
    """Until lmcache 0.5.5 the memory of a load that had failed could become readable (lmcache#5032)."""
    first, second = seen()["contents"]
    results = seen()[f"cut/{kind}"]
    assert results["whole"] == [seen()["size"]] * 2
    assert results["found"] == [[first]]
    assert results["found_after_a_store"] == [[first], [second]], "L1 has it again"


@pytest.mark.parametrize("kind", ["fs", "fs_native"])
def test_upstream_never_repairs_a_cut_file(kind: str) -> None:
    """A store of a key whose file is there is done at once: the reason not to make such files."""
    assert seen()[f"cut/{kind}"]["size"] == seen()["size"] // 2


def test_two_servers_that_stage_together_leave_a_cut_file_when_one_fails() -> None:
    assert seen()["staged together"] == {"sizes": [seen()["size"] // 2], "found": []}


def test_two_servers_that_stage_apart_do_not() -> None:
    first, _ = seen()["contents"]
    assert seen()["staged apart"] == {"sizes": [seen()["size"]], "found": [[first]]}
