"""vLLM's MoRIIOConnector with what pdserve's plan and proxy give it, on the installed vLLM without `mori` and a device.

A test here that fails has news: upstream may have changed its contract, or mended what the patch is for.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.upstream.run import INSTALLED_VLLM, probe

pytestmark = pytest.mark.upstream

PROBE = "tests.upstream.probes.moriio"
PROMPT = 53
"""Tokens."""


@cache
def seen() -> dict[str, Any]:
    results: dict[str, Any] = probe(INSTALLED_VLLM, PROBE)
    return results


def test_its_configuration_has_what_the_plan_meant() -> None:
    """Of the last of four workers of decode. Without `proxy_ip` it starts no heartbeat."""
    assert seen()["config"] == {
        "local_ip": "192.0.2.1",
        "proxy_ip": "",
        "proxy_ping_port": 0,
        "http_port": 8200,
        "handshake_port": 6305,
        "notify_port": 61009 + 3,
        "tp_rank": 3,
        "transfer_timeout": 3660,
        "recv_abort_timeout": 3660,
        "defer_timeout": 3660,
        "read_mode": True,
        "backend": "rdma",
    }


def test_prefills_answer_has_all_that_decode_needs_to_read() -> None:
    legs = seen()["legs"]
    assert legs["answer"]["remote_host"] == "192.0.2.1"
    assert (legs["answer"]["remote_handshake_port"], legs["answer"]["remote_notify_port"]) == (6301, 61005)
    assert legs["from"][:3] == ["192.0.2.1", 6301, 61005]
    assert legs["same_transfer"]
    assert legs["pairs"] == [4, 4], "blocks of decode, and those of prefill that they are read from"
    assert legs["computed_by_decode"] == 1


def test_prefill_holds_its_blocks_until_decode_has_released_them() -> None:
    assert (seen()["legs"]["held"], seen()["legs"]["free_after_the_release"]) == (4, True)


def test_a_request_that_is_aborted_in_decodes_queue_releases_them_without_a_read() -> None:
    assert seen()["aborted"] == {"blocks": [[]], "port": 61005}


def test_prefill_gives_them_up_only_after_the_proxy_has_ended_the_request() -> None:
    assert seen()["given_up"] == {"3600": False, "3661": True}


def test_a_prefill_that_ends_by_stop_keeps_nothing_and_says_nothing() -> None:
    assert seen()["stopped"] == {"answer": None, "keeps": False}


@cache
def unread(version: str) -> dict[str, Any]:
    results: dict[str, Any] = seen() if version == INSTALLED_VLLM else probe(version, PROBE, "unread")
    return results


@pytest.mark.parametrize(
    ("version", "not_read"),
    [
        (INSTALLED_VLLM, {"plain": 1, "no_blocks": 1, "no_engine": 1, "again": 1}),
        ("0.33.0", {"plain": PROMPT, "no_blocks": 1, "no_engine": 1, "again": PROMPT}),
    ],
)
def test_upstream_takes_prompts_of_a_decode_for_read_that_are_not(version: str, not_read: dict[str, int]) -> None:
    """Of them it computes the last token alone: the rest is whatever its blocks held before. 0.33 looks at the first of
    three things that a read needs."""
    assert unread(version)["unread_upstream"] == not_read


@pytest.mark.parametrize("version", [INSTALLED_VLLM, "0.33.0"])
def test_the_patch_has_decode_compute_what_it_does_not_read(version: str) -> None:
    assert unread(version)["unread"] == dict.fromkeys(("plain", "no_blocks", "no_engine", "again"), PROMPT)


def test_a_prompt_that_waits_for_blocks_is_counted_once() -> None:
    """The scheduler asks in each step how much of it will be read."""
    assert seen()["counted"] == 1


def test_an_address_in_a_request_id_counts_more_than_prefills_answer() -> None:
    """Which is why the proxy refuses such ids."""
    assert seen()["address"] == "192.0.2.99"
