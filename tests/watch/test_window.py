"""What was added within the last minute: by counters that may begin again, and by histograms."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from pdserve.observe.watch import Distribution, MetricsWindow
from pdserve.pd.telemetry.metrics import Metrics


def page(text: str) -> list[Sample]:
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def filled(*readings: tuple[float, str]) -> MetricsWindow:
    """A window of one process, p."""
    window = MetricsWindow(seconds=60)
    for at, text in readings:
        window.add(at, {"p": page(text)})
    return window


def test_a_rate_is_the_increase_by_the_time_between_first_and_last() -> None:
    window = filled((0, "a_total 5\n"))
    assert (window.seconds("p"), window.increase("p", "a_total"), window.rate("p", "a_total")) == (0, None, None)
    window = filled((0, "a_total 5\n"), (2, "a_total 5\n"), (10, "a_total 25\n"))
    assert (window.increase("p", "a_total"), window.rate("p", "a_total")) == (20, 2)
    assert filled((0, "a 5\n"), (10, "a 3\n")).increase("p", "a") is None, "a gauge is not counted"


def test_readings_older_than_the_window_do_not_count() -> None:
    window = filled((0, "a_total 0\n"), (50, "a_total 100\n"), (100, "a_total 100\n"), (110, "a_total 100\n"))
    assert (window.seconds("p"), window.increase("p", "a_total")) == (60, 0)


def test_a_process_that_began_again_counts_from_its_new_life() -> None:
    window = filled((0, "a_total 100\n"), (10, "a_total 7\n"))
    assert window.increase("p", "a_total") is None
    window.add(20, {"p": page("a_total 9\n")})
    assert (window.increase("p", "a_total"), window.seconds("p")) == (2, 10)
    lost = filled((0, 'a_total{x="1"} 3\n'), (10, 'a_total{x="2"} 5\n'))
    assert lost.increase("p", "a_total") is None, "a series that disappeared is a new life too"


def test_a_series_that_appears_counts_from_zero() -> None:
    """A proxy has no series of a status before the first answer with it."""
    window = filled((0, 'a_total{s="200"} 10\n'), (10, 'a_total{s="200"} 10\na_total{s="500"} 4\n'))
    assert window.increase("p", "a_total") == 4
    assert window.increase("p", "a_total", s="500") == 4
    assert window.increase("p", "a_total", s="404") is None


def test_what_does_not_answer_is_forgotten() -> None:
    window = filled((0, "a_total 0\n"), (10, "a_total 10\n"))
    window.add(12, {"p": "not listening"})
    assert window.increase("p", "a_total") is None
    window.add(14, {"p": page("a_total 12\n")})
    window.add(16, {"p": page("a_total 14\n")})
    assert window.rate("p", "a_total") == 1
    window.add(18, {})
    assert window.seconds("p") == 0


# Histograms ----------------------------------------------------------------------------------------------------------


def observed(*seconds: float) -> Metrics:
    metrics = Metrics()
    for value in seconds:
        metrics.ttft.observe(value)
    return metrics


def ttft(window: MetricsWindow, *processes: str) -> Distribution:
    seen = window.distribution(processes, "pdserve_proxy_ttft_seconds")
    assert seen is not None
    return seen


def test_only_the_observations_of_the_window_count() -> None:
    """Ten slow requests before it, four fast ones in it."""
    metrics = observed(*[50.0] * 10)
    window = MetricsWindow()
    window.add(0, {"p": page(metrics.page().decode())})
    for _ in range(4):
        metrics.ttft.observe(0.02)
    window.add(10, {"p": page(metrics.page().decode())})
    seen = ttft(window, "p")
    assert seen.count == 4
    assert seen.quantile(0.5) == pytest.approx(0.0175)  # in the middle of 0.01 to 0.025
    assert seen.largest_bound == 600


def test_processes_are_seen_together() -> None:
    window = MetricsWindow()
    window.add(0, {"a": page(observed().page().decode()), "b": page(observed().page().decode())})
    window.add(1, {"a": page(observed(0.02).page().decode()), "b": page(observed(0.02, 3).page().decode())})
    assert ttft(window, "a", "b").count == 3
    assert window.distribution(["c"], "pdserve_proxy_ttft_seconds") is None


def test_a_quantile_without_observations_or_beyond_all_bounds() -> None:
    assert Distribution(((1.0, 0.0), (float("inf"), 0.0))).quantile(0.5) is None
    assert Distribution(((1.0, 0.0), (10.0, 0.0), (float("inf"), 3.0))).quantile(0.99) == 10.0, "the largest bound"
