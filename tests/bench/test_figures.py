"""The client's figures, by hand and beside numpy's percentiles; the client's own file; the options' lists."""

from __future__ import annotations

import pytest
import typer

from pdserve.bench.figures import figures, keeps_limits
from pdserve.bench.workload import Load, SloMetric
from pdserve.cli import bench as bench_options
from tests.bench.evidence import record
from tests.tables import each_row


def test_two_requests_by_hand() -> None:
    done = [
        record(started=10.0, ttft=0.1, gaps=(0.02, 0.04), e2e=0.16, prompt_tokens=100, output_tokens=3),
        record(started=11.0, ttft=0.3, gaps=(0.05, 0.05), e2e=0.40, prompt_tokens=100, output_tokens=3),
    ]
    seen = figures(done, gpus=2, slo={"ttft": 200})
    assert seen.seconds == pytest.approx(1.4)
    assert seen.ttft is not None
    assert seen.ttft.mean == pytest.approx(200)
    assert seen.ttft.p50 == pytest.approx(200)
    assert seen.tpot is not None
    assert seen.tpot.mean == pytest.approx((30 + 50) / 2)
    assert seen.itl is not None
    assert seen.itl.p50 == pytest.approx(45)
    assert seen.output_per_second == pytest.approx(6 / 1.4)
    assert seen.output_per_second_per_gpu == pytest.approx(3 / 1.4)
    assert seen.total_per_second == pytest.approx(206 / 1.4)
    assert seen.interactivity_by_tpot == pytest.approx(1000 / 40)
    assert seen.interactivity_by_itl["p50"] == pytest.approx(1000 / 45)
    assert seen.goodput == pytest.approx(1 / 1.4)
    assert seen.good_share == 0.5
    assert seen.tokens_per_chunk == 1.0


@each_row("count", [1, 2, 3, 101])
def test_percentiles_are_those_of_linear_interpolation(count: int) -> None:
    """numpy.percentile's default, by its definition."""
    seen = figures([record(ttft=float(number)) for number in range(count)], gpus=0, slo={})
    assert seen.ttft is not None
    for percent in (50, 90, 95, 99):
        assert getattr(seen.ttft, f"p{percent}") == pytest.approx(1000 * (count - 1) * percent / 100)


def test_the_time_in_which_nothing_was_answered_counts_where_requests_were_open_at_the_end() -> None:
    """A deployment that hangs after a second of a minute has not answered as many a second as in its first one."""
    done, cut = record(started=100.0, e2e=1.0), record(started=101.0, ok=False, cut=True, e2e=0.0)
    assert figures([done, cut], gpus=0, slo={}, load_seconds=60.0).requests_per_second == pytest.approx(1 / 60)
    assert figures([done], gpus=0, slo={}, load_seconds=60.0).requests_per_second == pytest.approx(1.0)
    late = record(started=100.0, e2e=80.0)
    assert figures([late, cut], gpus=0, slo={}, load_seconds=60.0).seconds == pytest.approx(80.0)


def test_without_an_answer_there_are_no_times() -> None:
    seen = figures([record(ok=False)], gpus=8, slo={"ttft": 1})
    assert (seen.completed, seen.ttft, seen.goodput, seen.output_per_second_per_gpu) == (0, None, None, None)


@each_row("metric, limit, kept", [
    ("ttft", 100, True), ("ttft", 99, False), ("e2e", 190, True), ("e2e", 189, False), ("tpot", 10.01, True),
    ("tpot", 9.9, False),
    ("itl", 50, False),  # most gaps are 10 ms: it is the request's slowest percent that counts
    ("itl", 100, True),
])  # fmt: skip
def test_a_request_is_good_when_it_keeps_the_limit(metric: SloMetric, limit: float, kept: bool) -> None:
    gaps = (0.01,) * 8 + (0.1,) if metric == "itl" else (0.01,) * 9
    assert keeps_limits(record(gaps=gaps), {metric: limit}) is kept
    assert not keeps_limits(record(gaps=gaps, ok=False), {metric: limit})


def test_lists_of_loads() -> None:
    assert bench_options.read_loads("1, 8,8", "0.5", None) == (
        Load(concurrency=1, requests=32),
        Load(concurrency=8, requests=80),
        Load(rate=0.5, requests=32),
    )
    assert bench_options.read_loads("4", None, 7) == (Load(concurrency=4, requests=7),)


@each_row("text", ["ttft", "ttft=", "ttft=0", "ttft=-1", "ttft=inf", "ttft=nan", "latency=5", "=5"])
def test_an_slo_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is no limit"):
        bench_options.read_slo(text)
