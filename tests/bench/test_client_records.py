"""What a client left, read into our records: whole, and broken off. No crash, and never a result. AIPerf's output is
recorded, from a run of 0.13.0 against fake engines."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdserve.bench.clients import cut_records, read_aiperf_records
from pdserve.bench.figures import UnreadableResultError, figures, read_vllm_records
from pdserve.bench.snapshot import Clocks
from tests.launch.deployment import REPOSITORY
from tests.tables import each_row

RECORDED = REPOSITORY / "tests" / "fixtures" / "aiperf"
EXPORT = (RECORDED / "profile_export.jsonl").read_text()
"""Three requests that were answered with 32 tokens each, one every 50 ms; one that failed with a 500."""
WALL = 1795567272.0
CLOCKS = Clocks(wall=WALL, monotonic=100.0)


def changed(line: int, part: str, **changes: Any) -> str:
    rows = [json.loads(row) for row in EXPORT.splitlines()]
    rows[line][part] |= changes
    return "\n".join(map(json.dumps, rows))


def written(**changes: Any) -> str:
    """As `vllm bench serve --save-detailed` writes it: an answered request, a refused request, and a traceback."""
    raw: dict[str, Any] = {
        "start_times": [1.0, 2.0, 3.0],
        "input_lens": [8, 8, 8],
        "output_lens": [3, 0, 0],
        "ttfts": [0.5, 0.0, 0.0],
        "itls": [[0.1, 0.2], [], []],
        "latencies": [0.8, 0.0, 0.0],
        "errors": ["", "", "Traceback (most recent call last):\n  File\nClientPayloadError: cut\n"],
        "mean_ttft_ms": float("nan"),
    }
    return json.dumps(raw | changes)


def test_the_file_of_vllm_bench_serve() -> None:
    answered, refused, cut = read_vllm_records(written())
    assert (answered.ok, answered.gaps) == (True, (0.1, 0.2))
    assert answered.tpot == pytest.approx(0.15)
    assert not refused.ok, "an HTTP error without a reason phrase has an empty text"
    assert (cut.ok, cut.error) == (False, "ClientPayloadError: cut")


@each_row("text", ["", "[]", "{}", written(ttfts=[0.5]), written(itls=None), written(output_lens=["x", 0, 0])])
def test_a_file_that_is_not_whole_is_no_result(text: str) -> None:
    with pytest.raises(UnreadableResultError):
        read_vllm_records(text)


# --- AIPerf


def test_each_request_has_its_times_on_the_monotonic_clock_and_the_servers_counts() -> None:
    first, *_ = read_aiperf_records(EXPORT, CLOCKS)
    assert first.started == pytest.approx(100.926, abs=0.001)
    assert (first.ok, first.prompt_tokens, first.output_tokens) == (True, 930, 32)
    assert first.ttft == pytest.approx(0.30533, abs=1e-5)
    assert first.e2e == pytest.approx(1.98924, abs=1e-5)
    assert len(first.gaps) == 31
    assert first.ttft + sum(first.gaps) == pytest.approx(first.e2e, abs=0.001)


def test_a_failed_request_has_the_servers_own_words() -> None:
    failed = read_aiperf_records(EXPORT, CLOCKS)[-1]
    assert (failed.ok, failed.output_tokens) == (False, 0)
    assert failed.error.startswith("500 Internal Server Error")
    assert "scripted failure" in failed.error


def test_each_answer_has_the_length_that_its_turn_was_asked_for() -> None:
    asked = {("agent-0", 0): 32, ("agent-0", 1): 5}
    assert [record.asked_output for record in read_aiperf_records(EXPORT, CLOCKS, asked)[:3]].count(32) == 1
    assert read_aiperf_records(EXPORT, CLOCKS)[0].asked_output is None


def test_only_the_measured_phase_counts() -> None:
    assert len(read_aiperf_records(changed(0, "metadata", benchmark_phase="warmup"), CLOCKS)) == 3


def test_a_request_that_was_cancelled_is_neither_answered_nor_failed() -> None:
    (cut,) = [
        record for record in read_aiperf_records(changed(0, "metadata", was_cancelled=True), CLOCKS) if record.cut
    ]
    assert not cut.ok


def test_a_record_without_a_first_token_is_no_answer_that_keeps_every_slo() -> None:
    rows = [json.loads(row) for row in EXPORT.splitlines()]
    del rows[0]["metrics"]["time_to_first_token"]
    records = read_aiperf_records("\n".join(map(json.dumps, rows)), CLOCKS)
    assert [record.ok for record in records] == [False, True, True, False]


def test_what_was_open_at_the_end_is_counted_from_its_log() -> None:
    records = read_aiperf_records(EXPORT, CLOCKS)
    cut = cut_records((RECORDED / "cut.log").read_text(), records)
    assert len(cut) == 2
    assert all(record.cut and not record.ok for record in cut)
    assert figures(records + cut, gpus=0, slo={}).cut == 2
    assert cut_records("nothing of it", records) == ()


@each_row("text, problem", [
    ("{", "line 1"), ("{}", "KeyError: 'metadata'"), ("[]", "TypeError"),
    (changed(1, "metadata", request_start_ns="soon"), "line 2"),
    (changed(2, "metrics", usage_completion_tokens={"value": "many"}), "line 3"),
    (changed(2, "metrics", usage_completion_tokens={"value": float("inf")}), "line 3: OverflowError"),
])  # fmt: skip
def test_what_is_no_record_is_refused_with_its_line(text: str, problem: str) -> None:
    with pytest.raises(UnreadableResultError, match=problem):
        read_aiperf_records(text, CLOCKS)
