"""Why NIXL's push mode needs the patch nixl-push: the installed vLLM without it.

A test here that fails has news: upstream may have mended what the patch is for.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.upstream.run import INSTALLED_VLLM, probe

pytestmark = pytest.mark.upstream


@cache
def seen() -> dict[str, Any]:
    results: dict[str, Any] = probe(INSTALLED_VLLM, "tests.upstream.probes.nixl_push")
    return results


def test_a_request_whose_push_never_comes_waits_past_upstreams_own_limit() -> None:
    assert seen()["never_pushed"] == {
        "watched": ["a"],
        "then": [],
        "status": "WAITING_FOR_REMOTE_KVS",
        "all_free": False,
    }


def test_an_abort_of_it_reaches_no_worker_and_frees_no_block() -> None:
    assert seen()["aborted"] == {"informed": False, "status": "FINISHED_ABORTED", "all_free": False}


def test_load_timeout_has_it_computed_and_its_first_blocks_are_lost() -> None:
    assert seen()["given_up"] == {"computed": "length", "lost_blocks": 2}


def test_a_write_that_has_waited_for_its_handshake_begins_after_the_lease_from_blocks_that_are_free() -> None:
    assert seen()["after_the_lease"] == {"all_free": True, "written": ["a"]}


def test_the_blocks_of_a_write_that_is_under_way_are_freed_when_the_lease_ends() -> None:
    assert seen()["at_the_end_of_the_lease"] == {"under_way": ["a"], "all_free": True}
