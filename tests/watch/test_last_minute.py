"""Figures of the last minute from pages as proxy, engines and LMCache export them."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.samples import Sample

from pdserve.observe.watch import MetricsWindow, cache_minute, engine_minute, minute_traffic
from pdserve.pd.telemetry.metrics import Metrics
from tests.watch.test_window import page

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
