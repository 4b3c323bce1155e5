"""lmcache-host-events on LMCache's own event backend: nothing of another process is opened, and the order is kept."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.upstream.run import INSTALLED_VLLM, probe

pytestmark = pytest.mark.upstream


@cache
def seen() -> dict[str, Any]:
    results: dict[str, Any] = probe(INSTALLED_VLLM, "tests.upstream.probes.lmcache_host_events")
    return results


def test_upstream_sends_a_handle_of_pending_work_that_the_other_side_has_to_open() -> None:
    unpatched = seen()["unpatched"]
    assert unpatched["work is pending"] == {"sent_before_the_work_was_done": True, "the_other_side": "hangs"}
    assert unpatched["a future"] == "hangs"


@pytest.mark.parametrize("case", ["work is pending", "nothing is pending"])
def test_with_the_patch_it_is_sent_when_the_work_is_done_and_nothing_is_opened(case: str) -> None:
    assert seen()["patched"][case] == {"sent_before_the_work_was_done": False, "the_other_side": "complete"}


def test_a_future_of_the_engine_is_done_with_the_servers_answer() -> None:
    assert seen()["patched"]["a future"] == [False, True, True, True]
    assert seen()["patched"]["a future without work"] == seen()["unpatched"]["a future without work"]


def test_a_handle_of_a_side_without_the_patch_is_opened_as_ever() -> None:
    """It is no mark; the plan gives the patch to both sides."""
    assert seen()["patched"]["an unpatched other side"] == "hangs"


def test_it_counts_each_wait_once() -> None:
    assert seen()["counted"] == 3
