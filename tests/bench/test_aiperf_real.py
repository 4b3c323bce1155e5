"""The real AIPerf against fake engines. It runs only where `pdserve bench --setup` was run: 1.2 GB is for no test to
download."""

from __future__ import annotations

import json
import os
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.bench.clients import AIPERF, aiperf_folder, is_made
from tests.bench.kit import bench, reasons, serving_at
from tests.launch.deployment import REPOSITORY, Deployment

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        not is_made(aiperf_folder(os.environ)), reason=f"{AIPERF} is not installed: pdserve bench --setup"
    ),
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


def replay(tokenizer: str, *arguments: str) -> tuple[int, Any, str]:
    few = ("--repeats", "1", "--warmup", "0", "--tokenizer", tokenizer, "--concurrency", "2")
    return bench("--client", "aiperf", *few, *arguments)


def assert_counts(code: int, result: Any, output: str) -> None:
    """VALID, but for a client that waits for a CPU on a busy machine."""
    wrong = reasons(result)
    assert wrong <= {"client-cpu"}, output
    assert code == (9 if wrong else 0), output


def test_a_trace_is_replayed_with_its_sessions_and_both_hits(serving: Deployment, tokenizer: str) -> None:
    code, result, output = replay(tokenizer, "--trace", "agentic-tiny", "--sessions", "2")
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
    assert result["provenance"]["client"] == AIPERF
    files = [path for path in Path(result["folder"]).rglob("*") if path.is_file()]
    assert len(files) > 5
    assert not [path for path in files if serving.run.read_key() in path.read_text()]
