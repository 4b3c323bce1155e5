"""A real engine (no model) and real LMCache servers, each of which is killed: the engine must be the next one's."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.upstream.run import INSTALLED_VLLM, probe

pytestmark = pytest.mark.upstream
HEARTBEAT_SECONDS = 10.0
MOMENTS = {"never_used", "idle", "during_a_store", "during_a_retrieve", "during_a_lookup"}
PROMPT = 256


@cache
def kills(kind: str, count: int, heartbeat: float, down: float) -> list[dict[str, Any]]:
    """What was seen of so many, the moments of MOMENTS in turn."""
    seen: list[dict[str, Any]] = probe(
        INSTALLED_VLLM, "tests.upstream.probes.lmcache_lives", kind, str(count), str(heartbeat), str(down)
    )
    assert len(seen) == count
    return seen


def test_upstream_stays_unknown_to_a_server_that_is_back_before_it_was_missed() -> None:
    (seen,) = kills("upstream", 1, 2.0, 0.0)
    assert seen["registered"] is None
    assert seen.get("loaded", 0) == 0, "what it stored is gone, in silence"


def test_with_the_patches_a_worker_is_registered_within_a_heartbeat_whatever_it_did() -> None:
    lives = kills("patched", len(MOMENTS), HEARTBEAT_SECONDS, 0.0)
    assert {life["moment"] for life in lives} == MOMENTS
    for life in lives:
        assert life["registered"] is not None, life
        assert life["registered"] < HEARTBEAT_SECONDS + 2, life


def test_with_the_patches_every_request_ends_and_what_is_stored_then_is_loaded_again() -> None:
    for life in kills("patched", len(MOMENTS), HEARTBEAT_SECONDS, 0.0):
        assert life["finished"] is not None, life
        assert life["loaded"] == PROMPT, life


def test_and_by_a_server_that_is_back_after_several_heartbeats() -> None:
    for life in kills("patched", 2, 2.0, 6.0):
        assert life["registered"] is not None, life
        assert life["registered"] < 2.0 + 2, life
        assert life["loaded"] == PROMPT, life
