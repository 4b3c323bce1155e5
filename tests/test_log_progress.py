"""What a starting process is doing, told from its log."""

from __future__ import annotations

from pathlib import Path

from pdserve.logs.progress import describe, is_fatal
from tests.tables import each_row

LOGS = Path(__file__).parent / "fixtures" / "logs"


def story(name: str) -> list[str]:
    """What a reader of the whole log is told, in order."""
    lines = (LOGS / f"{name}.txt").read_text().split("\n")
    return [text for line in lines if (text := describe(line))]


def test_the_start_of_an_engine_is_reported_step_by_step() -> None:
    assert story("vllm-ready") == [
        "engine core starts (vLLM 0.32.0)",
        "loading the model",
        "loading weights: 0 % (0 of 1 shards)",
        "loading weights: 100 % (1 of 1 shards)",
        "weights loaded in 0.01 s",
        "KV cache: 524,288 tokens",
        "engine core ready after 2.30 s",
        "HTTP server starts",
    ]


def test_the_start_of_lmcache_is_reported_step_by_step() -> None:
    assert story("lmcache-ready") == [
        "LMCache starts (allocating L1)",
        "transfer mode auto",
        "request socket on 127.0.0.1:25555",
        "HTTP server is up",
    ]


def test_the_failure_of_an_engine_is_reported_before_it_ends() -> None:
    assert story("vllm-mooncake-no-device")[-1] == "the engine core has failed, its processes are ending"


def test_the_line_that_ends_a_start_is_distinguished_from_the_errors_around_it() -> None:
    log = (LOGS / "vllm-mooncake-no-device.txt").read_text().split("\n")
    fatal = [line for line in log if is_fatal(line)]
    assert fatal
    assert all("EngineCore failed to start" in line for line in fatal)
    assert not [line for line in (LOGS / "vllm-ready.txt").read_text().split("\n") if is_fatal(line)]


@each_row("line, text", [
        (
            "Loading safetensors checkpoint shards:  45% Completed | 29/64 [03:10<03:48,  6.5s/it]",
            "loading weights: 45 % (29 of 64 shards)",
        ),
        (
            "\rLoading safetensors checkpoint shards:  45% Completed | 29/64 [a]\r"
            "Loading safetensors checkpoint shards:  46% Completed | 30/64 [b]",
            "loading weights: 46 % (30 of 64 shards)",
        ),
        (
            "(Worker_TP0 pid=9) Multi-thread loading shards:  12% Completed | 8/64 [00:10<01:00]",
            "loading weights: 12 % (8 of 64 shards)",
        ),
        (
            "(Worker pid=4) INFO 11-21 [weight_utils.py:1043] Prefetching checkpoint files: 30% (3/10)",
            "reading weights into memory: 30 %",
        ),
        ("Capturing CUDA graphs (decode, FULL):  50%|█████     | 17/34 [00:04<00:04]", "capturing graphs: 50 %"),
        ("(Worker pid=4) INFO [m.py:1] Graph capturing finished in 9 secs, took 0.61 GiB", "graphs captured in 9 s"),
        ("(Worker pid=4) INFO [m.py:1] torch.compile took 31.20 s in total", "compiled in 31.20 s"),
        ("(EngineCore pid=1) INFO [k.py:1] GPU KV cache size: 1,234,567 tokens, Max", "KV cache: 1,234,567 tokens"),
        (
            "pdserve patches active: a-b, c (pid 7, process EngineCore)",
            "patches are active in EngineCore",
        ),
        ("pdserve patches active: a (pid 7, process vllm.entrypoints.api_server)", "patches are active in api_server"),
        ("\x1b[32;20m[2026] LMCache INFO:\x1b[0m Supported transfer mode: auto \x1b[3m(s.py)", "transfer mode auto"),
    ])  # fmt: skip
def test_single_lines(line: str, text: str) -> None:
    assert describe(line) == text


@each_row("line", [
    "",
    "INFO:     Uvicorn running on socket ('0.0.0.0', 8998)",
    "\r",
    'INFO:     127.0.0.1:1 - "GET /health HTTP/1.1" 200 OK',
    "Traceback",
])  # fmt: skip
def test_most_lines_are_no_progress(line: str) -> None:
    assert describe(line) is None
