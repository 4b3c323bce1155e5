"""LMCache's MP server without compiled kernels: the block copy that 0.4.5 and 0.4.6 lack, and the host copy on HIP."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.upstream.run import INSTALLED_VLLM, probe

pytestmark = pytest.mark.upstream
WITHOUT = ("0.4.5", "0.4.6")
WITH: tuple[str | None, ...] = ("0.4.7", None)


@cache
def seen(lmcache: str | None) -> dict[str, Any]:
    found: dict[str, Any] = probe(INSTALLED_VLLM, "tests.upstream.probes.lmcache_old_block_copy", lmcache=lmcache)
    return found


def test_two_old_versions_lack_the_operation_that_their_server_calls_and_later_ones_have_it() -> None:
    assert [seen(version)["there_without"] for version in WITHOUT] == [False, False]
    assert [seen(version)["there_without"] for version in WITH] == [True, True]


@pytest.mark.parametrize("lmcache", WITHOUT)
@pytest.mark.parametrize("reference", WITH)
def test_ours_moves_the_same_bytes_as_the_operation_of_later_versions(lmcache: str, reference: str | None) -> None:
    ours, theirs = seen(lmcache)["copies"], seen(reference)["copies"]
    assert len(ours) == 54, "three layouts, both directions, 0 to 8 leading blocks left alone"
    assert ours == theirs


@pytest.mark.parametrize("lmcache", WITHOUT)
def test_padded_pools_are_copied_block_by_block(lmcache: str) -> None:
    assert seen(lmcache)["padded"] == {"moved": True, "others untouched": True, "padding untouched": True}


@pytest.mark.parametrize("lmcache", WITHOUT)
def test_what_it_cannot_copy_is_refused_and_what_it_copies_is_counted(lmcache: str) -> None:
    assert seen(lmcache)["refused"] == {
        "heads first": "NotImplementedError",
        "MLA with two planes": "NotImplementedError",
        "uneven chunk": "ValueError",
        "odd width": "NotImplementedError",
    }
    assert seen(lmcache)["counted"]


@pytest.mark.parametrize("lmcache", [*WITHOUT, *WITH])
def test_on_hip_every_version_lets_the_cpu_read_device_memory_outside_of_the_stream(lmcache: str | None) -> None:
    """lmcache#4870: why a build without HIP kernels is refused on ROCm."""
    assert seen(lmcache)["cpu_reads_device_memory"]


@pytest.mark.parametrize("lmcache", WITHOUT)
def test_ours_copies_by_device_views_on_hip_and_leaves_other_runtimes_to_upstream(lmcache: str) -> None:
    assert seen(lmcache)["on_hip"] == {"views": ["cpu", "cuda:0"], "copied": True}
    assert seen(lmcache)["original_without_hip"]
