"""What was added within the last minute: by counters that may begin again, and by histograms."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from pdserve.observe.watch import Distribution, MetricsWindow, cache_minute, engine_minute, minute_traffic
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


def test_a_quantile_without_observations_or_beyond_all_bounds() -> None:
    assert Distribution(((1.0, 0.0), (float("inf"), 0.0))).quantile(0.5) is None
    assert Distribution(((1.0, 0.0), (10.0, 0.0), (float("inf"), 3.0))).quantile(0.99) == 10.0, "the largest bound"


# Figures from pages as proxy, engines and LMCache export them


RECORDED = Path(__file__).parents[1] / "fixtures" / "http"


def recorded(name: str, times: float = 1) -> list[Sample]:
    """A page that was recorded, with every figure so many times as large."""
    samples = page((RECORDED / name).read_text())
    return [sample._replace(value=sample.value * times) for sample in samples]


def seen_twice(process: str, first: list[Sample], last: list[Sample]) -> MetricsWindow:
    """Ten seconds apart."""
    window = MetricsWindow()
    window.add(0, {process: first})
    window.add(10, {process: last})
    return window


def test_clients_are_seen_through_the_proxy() -> None:
    metrics = Metrics()
    before = page(metrics.page().decode())
    for name, labels, amount in (
        ("requests", ("/v1/completions", "200"), 38),
        ("requests", ("/v1/completions", "502"), 2),
        ("errors", ("worker",), 2),
        ("errors", ("client",), 5),
        ("admission_rejections", ("decode", "full"), 10),
        ("failovers", ("prefill", "connect"), 1),
    ):
        metrics.count(name, labels, amount)
    for _ in range(40):
        metrics.ttft.observe(0.2)
    shown = minute_traffic(seen_twice("proxy", before, page(metrics.page().decode())), ["decode-0"])
    assert (shown.measured_by, shown.seconds) == ("proxy", 10)
    assert (shown.requests, shown.errors, shown.refused, shown.failovers) == (4, 0.2, 1, 0.1)
    assert (shown.prompt_tokens, shown.output_tokens) == (None, None), "no engine answered"
    assert shown.ttft is not None
    assert shown.ttft.count == 40
    assert shown.ttft.p50 is not None
    assert 0.1 < shown.ttft.p50 <= 0.25
    assert shown.itl is not None
    assert (shown.itl.count, shown.itl.p50) == (0, None)


def test_tokens_are_counted_by_the_engines_that_write_answers() -> None:
    """The proxy knows those of a stream only if its client asked for usage."""
    name = "vllm-0.32.0-decode.metrics"
    idle = page(Metrics().page().decode())
    window = MetricsWindow()
    window.add(0, {"proxy": idle, "decode-0": recorded(name)})
    window.add(10, {"proxy": idle, "decode-0": recorded(name, 2)})
    shown = minute_traffic(window, ["decode-0"])
    assert (shown.measured_by, shown.prompt_tokens, shown.output_tokens) == ("proxy", 371.9, 7)
    assert (shown.requests, shown.errors, shown.refused, shown.failovers) == (0, 0, 0, 0), "they are not unknown"


def test_without_figures_of_a_proxy_those_of_the_engines_count() -> None:
    name = "vllm-0.32.0-decode.metrics"
    shown = minute_traffic(seen_twice("decode-0", recorded(name), recorded(name, 2)), ["decode-0"])
    assert (shown.measured_by, shown.seconds, shown.errors, shown.output_tokens) == ("engines", 10, None, 7)
    nothing = minute_traffic(MetricsWindow(), ["decode-0"])
    assert (nothing.seconds, nothing.requests, nothing.ttft) == (0, None, None)


def test_latencies_of_the_engines_are_those_of_all_of_them_together() -> None:
    name = "vllm:inter_token_latency_seconds_bucket"
    window = MetricsWindow()
    for at, count in ((0, 0), (10, 8)):
        text = f'{name}{{le="0.01"}} {count}\n{name}{{le="0.1"}} {count}\n{name}{{le="+Inf"}} {count}\n'
        window.add(at, {"decode-0": page(text), "decode-1": page(text)})
    itl = minute_traffic(window, ["decode-0", "decode-1"]).itl
    assert itl is not None
    assert itl.count == 16
    assert itl.p50 is not None
    assert 0 < itl.p50 <= 0.01


def test_an_engine_by_source_and_hit_rates() -> None:
    name = "vllm-0.32.0-prefill.metrics"
    minute = engine_minute(seen_twice("prefill-0", recorded(name), recorded(name, 2)), "prefill-0")
    assert (minute.computed, minute.received) == (568.3, 51.2)
    assert minute.prefix_hit_rate == 0
    assert minute.external_hit_rate == 512 / 6195
    assert minute.preemptions == 0
    assert minute.failed_transfers is None


def test_failed_transfers_are_counted_by_nixl_or_by_the_patch_of_mooncakes_pulls() -> None:
    patch = 'pdserve_patch_effects_total{patch="mooncake-pulls",effect="pulls-failed"} '
    other = 'pdserve_patch_effects_total{patch="mooncake-pulls",effect="pulls-withdrawn"} 9\n'
    window = seen_twice("decode-0", page(f"{patch}1\n"), page(f"{patch}4\n{other}"))
    assert engine_minute(window, "decode-0").failed_transfers == 3
    nixl = "vllm:nixl_num_failed_transfers_total "
    assert engine_minute(seen_twice("d", page(f"{nixl}1\n"), page(f"{nixl}3\n")), "d").failed_transfers == 2


def test_a_pull_that_vllm_and_the_patch_both_count_failed_once() -> None:
    patch = 'pdserve_patch_effects_total{patch="mooncake-pulls",effect="pulls-failed"} '
    vllm = "vllm:mooncake_num_failed_recvs_total "
    for by_vllm, by_patch in ((3, 3), (1, 3), (3, 1)):
        window = seen_twice("d", page(f"{patch}0\n{vllm}0\n"), page(f"{patch}{by_patch}\n{vllm}{by_vllm}\n"))
        assert engine_minute(window, "d").failed_transfers == 3


def test_a_cache_over_all_its_salts() -> None:
    name = "lmcache-0.5.6.metrics"
    minute = cache_minute(seen_twice("lmcache-0", recorded(name), recorded(name, 2)), "lmcache-0")
    assert minute.hit_rate is not None
    assert 0 < minute.hit_rate < 1
    assert minute.stored
    assert minute.evicted is None
