"""A prompt with another cache_salt is another prompt to prefix-aware routing: engines share no KV between them."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from tests.proxy.deployment import Deployment

pytestmark = pytest.mark.process

PROMPT = "The quick brown fox jumps over the lazy dog. " * 40
LONG = "s" * 5000


def reasons(deployment: Deployment) -> Mapping[str, int]:
    """Why prefills were chosen, and how often."""
    page = deployment.proxy.http.get("/metrics").text
    line = r'^pdserve_proxy_routing_decisions_total\{(?=[^}]*role="prefill")[^}]*why="(\w+)"[^}]*\} (\d+)'
    return {why: int(float(count)) for why, count in re.findall(line, page, re.MULTILINE)}


def test_only_the_same_prompt_with_the_same_salt_matches(deployment: Deployment) -> None:
    deployment.up(prefills=2, routing={"prefill": {"kind": "prefix_aware"}})
    seen: list[str] = []
    for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": LONG + "1"}, {"cache_salt": LONG + "2"}):
        for _ in range(2):
            before = reasons(deployment)
            assert deployment.complete(PROMPT, **salt).status_code == 200
            now = reasons(deployment)
            seen += [why for why, count in now.items() if count > before.get(why, 0)]
    assert seen == ["no_match", "match"] * 5


def test_what_is_no_text_is_no_salt(deployment: Deployment) -> None:
    deployment.up(prefills=2, routing={"prefill": {"kind": "prefix_aware"}})
    for salt in ({}, {"cache_salt": None}):
        assert deployment.complete(PROMPT, **salt).status_code == 200
    assert reasons(deployment) == {"no_match": 1, "match": 1}
