"""A model with recurrent state goes on where it has a state: on the real Scheduler, with a prefix cache whose KV groups
have hits of different lengths."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.upstream.run import ALL_VLLM_VERSIONS, probe

pytestmark = pytest.mark.upstream
DIFFERS = [version for version in ALL_VLLM_VERSIONS if version < "0.28"]
BLIND = [version for version in DIFFERS if version < "0.27"]
"""The longest hit of any group counts, whatever the connector offers."""
AT_0 = {"goes_on_at": 0, "has_a_state": True}
AT_64 = {"goes_on_at": 64, "has_a_state": True}
AT_112 = {"goes_on_at": 112, "has_a_state": True}
WITHOUT = {"goes_on_at": 112, "has_a_state": False}
RIGHT = {
    "nothing is evicted": AT_112,
    "no state is left": AT_0,
    "the last state is evicted": AT_64,
    "full attention is evicted behind 32 tokens": AT_0,
    "no state is left, 160 tokens are offered": {"loads": 160},
    "nothing is evicted, 160 tokens are offered": {"loads": 48},
}


@cache
def seen(version: str) -> dict[str, Any]:
    results: dict[str, Any] = probe(version, "tests.upstream.probes.common_local_hit")
    return results


@pytest.mark.parametrize("version", DIFFERS)
@pytest.mark.parametrize("case", RIGHT)
def test_with_the_patch_it_goes_on_where_every_group_can(version: str, case: str) -> None:
    assert seen(version)["patched"][case] == RIGHT[case]


@pytest.mark.parametrize("version", BLIND)
@pytest.mark.parametrize("case", ["no state is left", "the last state is evicted"])
def test_upstream_goes_on_without_a_state_until_0_26(version: str, case: str) -> None:
    assert seen(version)["unpatched"][case] == WITHOUT


@pytest.mark.parametrize("version", DIFFERS)
def test_upstream_leaves_the_state_to_any_connector_until_0_27(version: str) -> None:
    assert seen(version)["unpatched"]["no state is left, 160 tokens are offered"] == {"loads": 48}


@pytest.mark.parametrize("version", DIFFERS)
def test_a_hit_of_all_groups_is_upstreams(version: str) -> None:
    for case in ("nothing is evicted", "nothing is evicted, 160 tokens are offered"):
        assert seen(version)["unpatched"][case] == RIGHT[case]


@pytest.mark.parametrize("version", DIFFERS)
def test_it_applies_and_counts_what_differs(version: str) -> None:
    assert seen(version)["verdict"] == "apply"
    assert seen(version)["counted"] == len(RIGHT) - 2


@pytest.mark.parametrize("version", DIFFERS)
def test_nixl_alone_keeps_upstreams_answer_where_upstream_falls_back(version: str) -> None:
    assert seen(version)["common"] == [version in BLIND, True, True]


@pytest.mark.parametrize("version", [version for version in ALL_VLLM_VERSIONS if version not in DIFFERS])
def test_since_0_28_upstream_is_right(version: str) -> None:
    assert seen(version)["verdict"] == "not-needed"
    assert seen(version)["unpatched"] == RIGHT
