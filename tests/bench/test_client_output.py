"""What a client left that is broken off, or has numbers that can be none, is no result: no crash, and not VALID."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.bench.clients import AiperfClient, ClientRun, VllmClient
from pdserve.bench.figures import UnreadableResultError
from pdserve.bench.snapshot import Clocks
from pdserve.bench.workload import Load, Workload
from tests.bench.evidence import plan
from tests.tables import each_row

CLOCKS = Clocks(wall=0.0, monotonic=0.0, boot=0.0)


def asked(folder: Path, **workload: Any) -> ClientRun:
    work = Workload(input_tokens=10, output_tokens=2, **workload)
    load = Load(requests=1, concurrency=1)
    return ClientRun(plan=plan(), workload=work, load=load, salt="s", seed=0, folder=folder, name="x")


def of_vllm(folder: Path, written: bytes) -> Any:
    run = asked(folder)
    run.result.write_bytes(written)
    return VllmClient("python", "/model").records(run, CLOCKS)


def of_aiperf(folder: Path, written: bytes) -> Any:
    run = asked(folder, client="aiperf")
    run.log.write_text("")
    (folder / "x.aiperf").mkdir()
    (folder / "x.aiperf" / "profile_export.jsonl").write_bytes(written)
    return AiperfClient("python", "/model").records(run, CLOCKS)


def vllm_file(**changes: Any) -> bytes:
    raw = {
        "start_times": [100.0],
        "input_lens": [10],
        "output_lens": [2],
        "ttfts": [0.1],
        "itls": [[0.01]],
        "latencies": [0.11],
        "errors": [""],
    }
    return json.dumps(raw | changes).encode()


def aiperf_file(**changes: float) -> bytes:
    metrics = {
        "usage_prompt_tokens": 10,
        "usage_completion_tokens": 2,
        "time_to_first_token": 100.0,
        "request_latency": 110.0,
    } | changes
    about = {"benchmark_phase": "profiling", "request_start_ns": 1, "request_end_ns": 2, "was_cancelled": False}
    values = {name: {"value": value} for name, value in metrics.items()}
    return json.dumps({"metadata": about, "metrics": values}).encode()


def test_whole_files_are_read(tmp_path: Path) -> None:
    assert [record.ok for record in of_vllm(tmp_path, vllm_file())] == [True]
    assert [record.ok for record in of_aiperf(tmp_path, aiperf_file())] == [True]


NONE = [float("nan"), float("inf"), -5.0]


@each_row("column, value", [
    *itertools.product(("output_lens", "input_lens", "ttfts", "latencies"), NONE),
    *itertools.product(("start_times",), NONE[:2]),
])  # fmt: skip
def test_a_number_of_vllm_bench_serve_that_can_be_none(tmp_path: Path, column: str, value: float) -> None:
    with pytest.raises(UnreadableResultError):
        of_vllm(tmp_path, vllm_file(**{column: [value]}))


@each_row("value", NONE)
def test_a_gap_that_can_be_none(tmp_path: Path, value: float) -> None:
    with pytest.raises(UnreadableResultError, match=r"gap 0 is"):
        of_vllm(tmp_path, vllm_file(itls=[[value]]))


@each_row("value", NONE)
@each_row("metric", ["usage_completion_tokens", "time_to_first_token", "request_latency"])
def test_a_number_of_aiperf_that_can_be_none(tmp_path: Path, metric: str, value: float) -> None:
    with pytest.raises(UnreadableResultError, match=r"^line 1: "):
        of_aiperf(tmp_path, aiperf_file(**{metric: value}))


def test_a_file_that_is_torn_inside_of_a_character(tmp_path: Path) -> None:
    torn = '{"start_times": [1.0], "errors": ["\u00e9'.encode()[:-1]
    for read in (of_vllm, of_aiperf):
        with pytest.raises(UnreadableResultError):
            read(tmp_path, torn)


def test_half_a_surrogate_pair_in_an_error_is_text_that_a_file_takes(tmp_path: Path) -> None:
    [of_the_fallback] = of_vllm(tmp_path, vllm_file(errors=["broken \ud83d"]))
    line = json.loads(aiperf_file())
    line["error"] = {"code": 500, "type": "\ud83d", "message": "broken \ud83d"}
    [of_the_client] = of_aiperf(tmp_path, json.dumps(line).encode())
    assert of_the_fallback.error == "broken \\ud83d"
    assert of_the_client.error == "500 \\ud83d broken \\ud83d"
