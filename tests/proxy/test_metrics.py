"""The proxy's metrics page: what was counted is on it, once, also when several processes counted."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from pdserve.pd.serve.page_limit import FRESH_A_SECOND, PageLimit
from pdserve.pd.telemetry.metrics import Histogram, Metrics
from pdserve.pd.telemetry.metrics_page import COUNTERS, GAUGES, STAGES

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(page: bytes) -> Samples:
    """By name and labels, as Prometheus reads them."""
    by_labels: Samples = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            place = (sample.name, tuple(sorted(sample.labels.items())))
            assert place not in by_labels, f"{place} is there twice"
            by_labels[place] = sample.value
    return by_labels


def test_every_metric_is_named_after_the_proxy_and_explained() -> None:
    families = list(text_string_to_metric_families(Metrics().page().decode()))
    assert {f.name for f in families} == {
        *(f"pdserve_proxy_{stage}_seconds" for stage in STAGES),
        *(f"pdserve_proxy_{name}" for name in (*COUNTERS, *GAUGES)),
    }
    assert all(len(family.documentation) > 8 for family in families)


def test_a_histogram_counts_up_to_and_including_its_bounds() -> None:
    metrics = Metrics()
    for seconds in (0.0, 0.001, 0.0011, 600.0, 601.0):
        metrics.ttft.observe(seconds)
    values = samples(metrics.page())
    name = "pdserve_proxy_ttft_seconds"
    assert values[f"{name}_bucket", (("le", "0.001"),)] == 2
    assert values[f"{name}_bucket", (("le", "0.0025"),)] == 3
    assert values[f"{name}_bucket", (("le", "600.0"),)] == 4
    assert values[f"{name}_bucket", (("le", "+Inf"),)] == 5
    assert values[f"{name}_count", ()] == 5
    assert values[f"{name}_sum", ()] == pytest.approx(1201.0021)


@given(st.lists(st.floats(0, 1000)))
def test_every_observation_is_in_one_bucket(values: list[float]) -> None:
    histogram = Histogram((0.1, 1, 10))
    for value in values:
        histogram.observe(value)
    bounds = (-1.0, 0.1, 1, 10, float("inf"))
    expected = [sum(low < value <= high for value in values) for low, high in itertools.pairwise(bounds)]
    assert histogram.counts == expected


def test_counters_have_their_labels() -> None:
    metrics = Metrics()
    metrics.count("failovers", ("prefill", "refused"))
    metrics.count("failovers", ("prefill", "refused"))
    metrics.count("failovers", ("decode", "status"))
    metrics.count("completion_tokens", (), 37)
    values = samples(metrics.page())
    assert values["pdserve_proxy_failovers_total", (("reason", "refused"), ("role", "prefill"))] == 2
    assert values["pdserve_proxy_failovers_total", (("reason", "status"), ("role", "decode"))] == 1
    assert values["pdserve_proxy_completion_tokens_total", ()] == 37
    assert values["pdserve_proxy_unauthorized_total", ()] == 0


def test_a_counter_that_does_not_exist_is_a_mistake() -> None:
    with pytest.raises(KeyError):
        Metrics().count("failover")


def test_gauges_are_read_when_the_page_is_made() -> None:
    metrics = Metrics()
    depth = 3.0
    metrics.read_gauges_from(lambda: [("queue_depth", ("decode",), depth)])
    assert samples(metrics.page())["pdserve_proxy_queue_depth", (("pool", "decode"),)] == 3
    depth = 0.0
    assert samples(metrics.page())["pdserve_proxy_queue_depth", (("pool", "decode"),)] == 0


def test_several_processes_are_added_up_and_what_they_share_is_not() -> None:
    processes = [Metrics() for _ in range(3)]
    for number, metrics in enumerate(processes):
        metrics.itl.observe(0.003)
        metrics.e2e.observe(number)
        metrics.count("requests", ("/v1/completions", "200"), number)
        metrics.read_gauges_from(
            lambda: [("queue_depth", ("decode",), 2), ("in_flight", ("decode", "decode-0"), 7), ("connections", (), 4)]
        )
    values = samples(processes[0].page([other.snapshot() for other in processes[1:]]))
    assert values["pdserve_proxy_itl_seconds_count", ()] == 3
    assert values["pdserve_proxy_e2e_seconds_sum", ()] == 3
    assert values["pdserve_proxy_requests_total", (("path", "/v1/completions"), ("status", "200"))] == 3
    assert values["pdserve_proxy_queue_depth", (("pool", "decode"),)] == 6
    assert values["pdserve_proxy_connections", ()] == 12
    assert values["pdserve_proxy_in_flight", (("role", "decode"), ("worker", "decode-0"))] == 7


def test_a_page_counts_nothing_twice_when_it_is_asked_for_twice() -> None:
    asked, other = Metrics(), Metrics()
    other.count("unauthorized")
    other.queue.observe(1)
    snapshot = other.snapshot()
    assert asked.page([snapshot]) == asked.page([snapshot])


def test_what_is_no_snapshot_is_refused() -> None:
    with pytest.raises(msgspec.MsgspecError):
        Metrics().page([b"{}"])


def test_the_page_is_made_only_so_often_whoever_asks() -> None:
    made, now = itertools.count(), [100.2]
    limit = PageLimit(lambda: b"%d" % next(made), lambda: now[0])
    pages = [limit.page() for _ in range(10 * FRESH_A_SECOND)]
    assert pages[:FRESH_A_SECOND] == [b"%d" % number for number in range(FRESH_A_SECOND)]
    assert set(pages[FRESH_A_SECOND:]) == {pages[FRESH_A_SECOND - 1]}
    now[0] = 101.0
    assert limit.page() == b"%d" % FRESH_A_SECOND
