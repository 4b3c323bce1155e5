"""`pdserve bench` with a fake AIPerf over fake engines: sessions, their header, verdicts, what the result has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.bench.kit import serving_at, stand_in
from tests.bench.test_bench import reasons, wait_until
from tests.launch.deployment import Command, Deployment, pdserve

pytestmark = pytest.mark.process

FEW = ("--concurrency", "2", "--repeats", "1", "--warmup", "0")


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with serving_at(tmp_path_factory.mktemp("aiperf-bench"), 0.02) as deployment:
        yield deployment


@pytest.fixture
def python(tmp_path: Path) -> str:
    """What stands for the interpreter of AIPerf's environment."""
    return stand_in(tmp_path, "aiperf_client.py")


def bench(python: str, *arguments: str) -> tuple[int, Any, str]:
    code, output = pdserve("bench", "--json", "--client", "aiperf", "--python", python, *FEW, *arguments)
    result, _ = json.JSONDecoder().raw_decode(output, output.index("{\n"))  # an error follows
    return code, result, output


def test_a_trace_keeps_its_sessions_and_both_its_hits(serving: Deployment, python: str) -> None:
    code, result, output = bench(python, "--trace", "agentic-tiny", "--sessions", "3")
    assert (code, reasons(result)) == (0, set()), output
    assert result["provenance"]["client"] == "AIPerf 0.13.0"
    assert result["provenance"]["versions"]["aiperf"] == "0.13.0"
    assert result["workload"]["trace_digest"] == result["trace"]["digest"]
    (one,) = result["measurements"]
    assert one["load"]["requests"] == one["figures"]["completed"] == 15
    window = one["window"]["prefill"]
    hits = window["local_hits"] + window["received"]
    assert hits / (hits + window["computed"]) == pytest.approx(result["trace"]["prefix_hit"], abs=0.1)
    assert not one["verdict"]["unchecked"]
    folder = Path(result["folder"])
    assert (folder / one["raw"]).read_text().count("\n") == 15
    assert not [file for file in folder.iterdir() if file.is_file() and serving.run.read_key() in file.read_text()]
    log = "".join(file.read_text() for file in serving.run.logs.glob("proxy*"))
    assert log.count("/v1/chat/completions") >= 15


@pytest.mark.full
def test_the_same_trace_again_is_as_cold_as_before(serving: Deployment, python: str) -> None:
    trace = ("--trace", "agentic-tiny", "--sessions", "2", "--repeats", "2", "--warmup", "5")
    code, result, output = bench(python, *trace)
    assert (code, reasons(result)) == (0, set()), output
    first, second = (each["window"]["prefill"]["computed"] for each in result["measurements"])
    assert first == pytest.approx(second, rel=0.1)


@pytest.mark.full
def test_fixed_lengths_are_measured_as_with_the_other_client(serving: Deployment, python: str) -> None:
    code, result, output = bench(python, "--input-tokens", "600", "--output-tokens", "4", "--requests", "6")
    assert (code, reasons(result)) == (0, set()), output
    (one,) = result["measurements"]
    assert (one["figures"]["input_tokens"], one["figures"]["output_tokens"]) == (3600, 24)
    assert result["trace"] is None


@pytest.mark.parametrize(("fault", "expected"), [("die", {"client", "completed"}), ("wrong-length", {"output-length"})])
@pytest.mark.full
def test_a_client_that_fails_or_asks_something_else_makes_it_invalid(
    serving: Deployment, python: str, monkeypatch: pytest.MonkeyPatch, fault: str, expected: set[str]
) -> None:
    monkeypatch.setenv("FAKE_AIPERF", fault)
    code, result, output = bench(python, "--trace", "agentic-tiny", "--sessions", "2")
    assert (code, reasons(result)) == (9, expected), output
    assert "TokenizerError" in output or fault != "die"


@pytest.mark.full
def test_a_term_ends_it(serving: Deployment, python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("FAKE_AIPERF", "hang")
    command = Command("bench", "--client", "aiperf", "--python", python, *FEW, "--trace", "agentic-tiny")
    wait_until(lambda: bool(list(tmp_path.glob("pdserve-*/prompts"))))
    command.popen.terminate()
    assert command.finish() == 143, command.output
    assert not list(tmp_path.glob("pdserve-*"))


@pytest.mark.full
def test_the_table_has_the_hit_in_theory(serving: Deployment, python: str) -> None:
    code, output = pdserve("bench", "--python", python, *FEW, "--trace", "agentic-tiny", "--sessions", "2")
    assert code == 0, output
    assert "theory 7" in " ".join(output.replace("│", " ").split())


def test_a_bad_trace_is_refused_before_anything_is_sent(serving: Deployment, python: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"input_length": "many"}\n')
    code, output = pdserve("bench", "--python", python, *FEW, "--trace", file)
    assert code == 2
    assert "bad.jsonl:1" in output


@pytest.mark.full
def test_the_session_of_each_request_reaches_the_proxy(serving: Deployment, python: str) -> None:
    code, _, output = bench(python, "--trace", "agentic-tiny", "--sessions", "2", "--session-header", "X-Session-ID")
    assert code == 0, output
    plan = serving.run.read_plan()
    decode = next(worker.url for worker in plan.proxy.workers if worker.name == "decode-0")
    headers = {"Authorization": f"Bearer {serving.run.read_key()}"}
    sent = httpx.get(f"{decode}/fake/requests", headers=headers, trust_env=False).json()[-10:]
    assert len({request["headers"].get("x-session-id") for request in sent}) == 2
