"""The real AIPerf against fake engines. It runs only where `pdserve bench --setup` was run: 1.2 GB is for no test to
download."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.bench.aiperf_environment import NAME, made, place
from tests.bench.kit import AGENTIC_SEED, AGENTIC_SESSIONS, agentic_file, serving_at
from tests.bench.test_bench import reasons, scripted
from tests.launch.deployment import REPOSITORY, Deployment, pdserve

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not made(place(os.environ)), reason=f"{NAME} is not installed: pdserve bench --setup"),
]


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with serving_at(tmp_path_factory.mktemp("aiperf"), 0.05) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """That of the tiny model: it reads bytes."""
    pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("tokenizer")
    script = runpy.run_path(str(REPOSITORY / "scripts" / "tiny_model.py"))
    script["tokenizer"]()[0].save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": script["CHAT_TEMPLATE"]}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return str(folder)


def bench(tokenizer: str, *arguments: str) -> tuple[int, Any, str]:
    few = ("--repeats", "1", "--warmup", "0", "--tokenizer", tokenizer, "--concurrency", "2")
    code, output = pdserve("bench", "--json", "--client", "aiperf", *few, *arguments)
    result, _ = json.JSONDecoder().raw_decode(output, output.index("{\n"))  # an error follows
    return code, result, output


def assert_counts(code: int, result: Any, output: str) -> None:
    """VALID, but for a client that waits for a CPU on a busy machine."""
    wrong = reasons(result)
    assert wrong <= {"client-cpu"}, output
    assert code == (9 if wrong else 0), output


def test_a_trace_is_replayed_with_its_sessions_and_both_hits(serving: Deployment, tokenizer: str) -> None:
    code, result, output = bench(tokenizer, "--trace", "agentic-tiny", "--sessions", "2")
    assert_counts(code, result, output)
    (one,) = result["measurements"]
    assert (one["figures"]["completed"], one["figures"]["output_tokens"]) == (10, 10 * 32)
    assert one["figures"]["ttft"]["mean"] > 0
    assert one["figures"]["itl"]["p50"] == pytest.approx(50, rel=0.5)
    assert result["trace"]["requests"] == 10
    assert 0.6 < result["trace"]["prefix_hit"] < 0.9
    window = one["window"]["prefill"]
    hits = window["local_hits"] + window["received"]
    assert hits / (hits + window["computed"]) == pytest.approx(result["trace"]["prefix_hit"], abs=0.1)
    assert result["provenance"]["client"] == NAME
    files = [path for path in Path(result["folder"]).rglob("*") if path.is_file()]
    assert len(files) > 5
    assert not [path for path in files if serving.run.read_key() in path.read_text()]


def test_the_agentic_trace_is_what_its_generator_makes(tmp_path: Path) -> None:
    configuration = tmp_path / "small.json"
    configuration.write_text(agentic_file("json"))
    size = ("--num-sessions", str(AGENTIC_SESSIONS), "--seed", str(AGENTIC_SEED))
    argv = [
        str(place(os.environ) / "bin" / "aiperf"),
        "synthesize",
        "agentic-code",
        "--config",
        str(configuration),
        *size,
    ]
    done = subprocess.run([*argv, "--output", str(tmp_path)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (generated,) = tmp_path.glob("*/dataset.jsonl")
    assert generated.read_text() == agentic_file("jsonl")


SAID = {"role": "user", "content": "What is in the file?"}
FORMATS: dict[str, list[dict[str, Any]]] = {
    "mooncake": [
        {"session_id": "a", "input_length": 40, "output_length": 4, "hash_ids": [1, 2, 3]},
        {"session_id": "a", "input_length": 20, "output_length": 5, "hash_ids": [7, 8], "delay": 20},
        {"session_id": "b", "input_length": 40, "output_length": 6, "hash_ids": [1, 2, 4]},
    ],
    "conversations": [
        {"turns": [{"role": "system", "text": "Be brief."}, {"text": "Hello", "output_length": 4}, {"text": "And?"}]},
        {"turns": [{"text": "Hi", "output_length": 4}]},
    ],
    "sub-agents": [
        {
            "session_id": "root",
            "turns": [
                {"messages": [SAID], "max_tokens": 4, "spawns": ["sub"]},
                {"messages": [SAID], "max_tokens": 5, "forks": ["fork"]},
            ],
        },
        {"session_id": "sub", "turns": [{"messages": [SAID], "max_tokens": 3}]},
        {"session_id": "fork", "turns": [{"messages": [SAID], "max_tokens": 6}]},
        {"session_id": "other", "turns": [{"messages": [SAID], "max_tokens": 4}]},
    ],
}


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_is_replayed_whole(serving: Deployment, tokenizer: str, tmp_path: Path, form: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in FORMATS[form]))
    code, result, output = bench(tokenizer, "--trace", str(file), "--output-tokens", "7")
    assert_counts(code, result, output)
    assert result["trace"]["format"] == form
    figures = result["measurements"][0]["figures"]
    assert figures["completed"] == result["trace"]["requests"]


def test_prompts_of_a_fixed_length_are_sent_until_the_time_is_over(serving: Deployment, tokenizer: str) -> None:
    length = ("--input-tokens", "300", "--output-tokens", "20", "--requests", "200")
    code, result, output = bench(tokenizer, *length, "--duration", "4", "--grace", "0")
    assert_counts(code, result, output)
    figures = result["measurements"][0]["figures"]
    assert 2 <= figures["completed"] < 200
    assert figures["input_tokens"] == 300 * figures["completed"]
    assert figures["cut"] <= 2


def test_requests_that_fail_make_it_invalid_whatever_aiperf_says(serving: Deployment, tokenizer: str) -> None:
    scripted(serving, "decode-0", decode_status=500)
    try:
        code, result, output = bench(tokenizer, "--trace", "agentic-tiny", "--sessions", "2")
    finally:
        scripted(serving, "decode-0", decode_status=0)
    assert (code, reasons(result)) == (9, {"client", "completed", "errors"}), output


def test_one_that_takes_too_long_is_stopped_with_all_of_its_processes(serving: Deployment, tokenizer: str) -> None:
    before = set(Path(tempfile.gettempdir()).glob("*aiperf*"))
    code, _, output = bench(tokenizer, "--trace", "agentic-tiny", "--limit", "6")
    assert code == 9
    assert "was stopped after 6 s (--limit)" in output
    assert set(Path(tempfile.gettempdir()).glob("*aiperf*")) == before
