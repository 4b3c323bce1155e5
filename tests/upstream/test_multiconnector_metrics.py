"""MultiConnector's metrics with the real classes of both ends: it survives Mooncake's, and each child has its own."""

from __future__ import annotations

from typing import Any

import pytest

from tests.upstream.multiconnector import measured
from tests.upstream.run import VLLM_VERSIONS

pytestmark = [pytest.mark.upstream, pytest.mark.parametrize("version", VLLM_VERSIONS)]

CORRECTED = "0.33.0"


def metrics(version: str) -> Any:
    return measured(version)["metrics"]


def test_the_api_server_dies_of_the_first_transfers_statistics_unless_patched(version: str) -> None:
    results = metrics(version)
    if version == CORRECTED:
        assert results["crash"] is None, "upstream skips children without metrics"
    else:
        assert "MooncakeConnector is not contained in the list of registered connectors" in results["crash"]
    assert results["patched crash"] is None


def test_the_patch_applies_where_it_is_needed_and_counts_what_it_drops(version: str) -> None:
    results = metrics(version)
    expected = ("not-needed", 0) if version == CORRECTED else ("apply", 1)
    assert (results["verdict"], results["dropped"]) == expected


def test_every_child_has_its_series_from_the_start(version: str) -> None:
    at_start = metrics(version)["counted"]["start"]
    names = {"queries_total", "hits_total", "hit_tokens_total", "misses_total", "pending_loads"}
    assert at_start == {name: {"0": {}, "1": {}} for name in names}


def test_counts_reach_the_api_server_by_engine_and_child(version: str) -> None:
    """One load and one miss in each engine, in the second one another load; a lost choice is neither hit nor miss."""
    end = metrics(version)["counted"]["end"]
    a, b, mooncake = "MockConnector-0", "MockConnector-1", "MooncakeConnector"
    assert end["queries_total"] == {"0": dict.fromkeys((a, b, mooncake), 2), "1": dict.fromkeys((a, b, mooncake), 3)}
    assert end["hits_total"] == {"0": {a: 1}, "1": {a: 1, b: 1}}
    assert end["hit_tokens_total"] == {"0": {a: 48}, "1": {a: 48, b: 64}}
    assert end["misses_total"] == {"0": {a: 1, b: 1, mooncake: 2}, "1": {a: 2, b: 1, mooncake: 3}}


def test_a_pending_load_is_shown_until_it_arrives_or_no_request_waits_for_it(version: str) -> None:
    counted = metrics(version)["counted"]
    a, b = "MockConnector-0", "MockConnector-1"
    assert counted["loading"]["pending_loads"] == {"0": {a: 1}, "1": {a: 1, b: 1}}
    assert counted["aborted"]["pending_loads"] == {"0": {a: 1}, "1": {a: 1}}
    assert counted["end"]["pending_loads"] == {"0": {}, "1": {}}


def test_they_are_in_the_log_line_beside_the_statistics_of_the_children(version: str) -> None:
    line = metrics(version)["counted"]["log"]
    assert "MooncakeConnector={" in line
    assert "selection={'queries': {'MockConnector-0': 2" in line


def test_they_arrive_without_statistics_of_any_worker(version: str) -> None:
    results = metrics(version)["without transfers"]
    children = {"ExampleConnector-0": 1, "ExampleConnector-1": 1}
    assert results["upstream"] == {}
    assert results["ours"]["queries_total"]["0"] == results["ours"]["misses_total"]["0"] == children
