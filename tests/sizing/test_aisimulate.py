"""`pdserve plan --aisimulate DEVICE`: what AISimulate is asked, and what becomes of its answers.

The program here is a stand-in with the command line and the summary of aisimulate 0.13: it answers by its input. The
real one is not installed by any set-up (docs/plan.md has a run of it).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from pdserve.cli.commands import app
from pdserve.errors import PdserveError, PreflightError, RecipeError
from pdserve.sizing.aisimulate import MOST_PREFILLS
from tests.sizing.kit import CONFIG

pytestmark = pytest.mark.process

PROGRAM = """\
#!{python}
import json, os, sys
from pathlib import Path
words = sys.argv[1:]
assert words[0] == "predict" and words[words.index("--format") + 1] == "json", words
asked = json.loads(Path(words[words.index("--config") + 1]).read_text())
with open({folder!r} + "/asked", "a") as file:
    file.write(json.dumps(asked) + "\\n")
few = asked["traffic"]["source"]["output_tokens"] == 2
answer = {answers}["prefill" if few else "decode"]
print("a line that is no answer")
print(answer if isinstance(answer, str) else json.dumps(answer))
sys.exit({code})
"""
BASIS = {"estimator": "op_level", "data_version": "0.24.0", "timing_source": "aic"}


def summary(prompt: float, output: float, completed: int = 100) -> dict[str, Any]:
    return {
        "completed_requests": completed,
        "input_throughput_tok_s": prompt if completed else None,
        "output_throughput_tok_s": output if completed else None,
        "prediction_provenance": {"prefill": BASIS, "decode": BASIS},
        "another_key": 1,
    }


ANSWERS: dict[str, Any] = {"prefill": summary(16000, 8), "decode": summary(40000, 4000)}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    document = {
        "schema": 1,
        "name": "tiny",
        "platform": "cuda",
        "status": "tested",
        "devices_per_node": 8,
        "model": {"path": "model", "served_name": "tiny"},
        "engine": {"args": {"max-model-len": 4096}},
        "prefill": {"parallel": {"tp": 2}, "connector": {"kind": "nixl"}, "args": {"max-num-batched-tokens": 8000}},
        "decode": {"instances": 2, "connector": {"kind": "nixl"}, "args": {"max-num-seqs": 64}},
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def installed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any] | None = None, code: int = 0
) -> None:
    program = folder / "bin" / "aisimulate"
    program.parent.mkdir()
    text = PROGRAM.format(python=sys.executable, folder=str(folder), answers=answers or ANSWERS, code=code)
    program.write_text(text)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))


def asked(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (folder / "asked").read_text().splitlines()]


def planned(recipe: Path, *words: str) -> dict[str, Any]:
    load = ("--prompt-tokens", "1000", "--output-tokens", "100")
    done = CliRunner().invoke(app, ["plan", str(recipe), "--aisimulate", "h200_sxm", *load, "--json", *words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def refused(recipe: Path, *words: str) -> PdserveError:
    with pytest.raises(PdserveError) as caught:
        planned(recipe, *words)
    assert caught.value.todo
    return caught.value


def test_its_rates_are_marked_as_an_estimate(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, monkeypatch)
    made = planned(recipe)
    basis = "AISimulate's estimate for h200_sxm (op_level, data of vLLM 0.24.0), not measured"
    assert made["balance"] == {
        "prefill": 16.0,
        "decode": 80.0,
        "prefill_rate": 16000.0,
        "decode_rate": 4000.0,
        "rates_from": basis,
    }
    assert [basis in crossing["what"] for crossing in made["crossings"]] == [True]


def test_each_side_alone_is_asked_about(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, monkeypatch)
    planned(recipe)
    filled, written = asked(tmp_path)
    assert filled["traffic"] == {
        "source": {"type": "synthetic", "input_tokens": 1000, "output_tokens": 2},
        "load": {"type": "concurrency", "concurrency": 16},
        "stop": {"requests": 128},
    }
    assert written["traffic"]["load"] == {"type": "concurrency", "concurrency": 64}
    assert written["traffic"]["source"]["output_tokens"] == 100
    assert filled["engine"]["workers"]["prefill"] == {
        "parallelism": {"replicas": 1, "tensor": 2, "pipeline": 1, "attention_data": 1},
        "context_length": 4096,
        "scheduler": {"max_batched_tokens": 8000},
    }
    replicas = [
        tuple(each["engine"]["workers"][role]["parallelism"]["replicas"] for role in ("prefill", "decode"))
        for each in (filled, written)
    ]
    assert replicas == [(1, 4), (8, 1)]


def test_decode_is_asked_until_it_is_the_limit(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, monkeypatch, {"prefill": summary(1000, 8), "decode": summary(40000, 4000)})
    planned(recipe)
    numbers = [each["engine"]["workers"]["prefill"]["parallelism"]["replicas"] for each in asked(tmp_path)]
    assert numbers == [1, 8, 32, 128], "1.5 times the 40 requests a second of decode, at one a prefill"
    assert numbers[-1] < MOST_PREFILLS


def test_experts_are_spread_as_written(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, monkeypatch)
    config = {**CONFIG, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8}
    config |= {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    planned(recipe, "--set", "decode.parallel.dp=4", "--set", "decode.parallel.ep=true")
    workers = asked(tmp_path)[0]["engine"]["workers"]
    assert workers["prefill"]["parallelism"]["moe_tensor"] == 2
    assert workers["decode"]["parallelism"]["moe_expert"] == 4


def test_what_it_is_not_asked_is_named(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, monkeypatch)
    assert planned(recipe, "--set", "engine.args.kv-cache-dtype=fp8")["balance"]["rates_from"].endswith(
        "not measured; without kv-cache-dtype"
    )


def test_lengths_that_do_not_fit_are_refused(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, monkeypatch)
    assert "do not fit in max-model-len 1000" in refused(recipe, "--set", "engine.args.max-model-len=1000").what
    assert not (tmp_path / "asked").exists()


def test_a_rate_that_is_given_holds(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, monkeypatch)
    balance = planned(recipe, "--prefill-rate", "5000")["balance"]
    assert (balance["prefill_rate"], balance["decode_rate"]) == (5000.0, 4000.0)
    assert balance["rates_from"].startswith("decode: AISimulate's estimate")
    assert "both rates are given" in refused(recipe, "--prefill-rate", "5000", "--decode-rate", "1").what


def test_a_decode_never_filled_has_a_bound(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, monkeypatch, {"prefill": summary(1, 8), "decode": summary(40000, 4000)})
    assert planned(recipe)["balance"]["rates_from"].endswith("of decode at least, as 512 prefills do not fill one")


@pytest.mark.parametrize(
    "words", [("--set", "platform=rocm"), ("--set", "platform=cpu", "--unset", "devices_per_node")]
)
def test_other_devices_than_nvidias_are_refused(recipe: Path, words: tuple[str, ...]) -> None:
    error = refused(recipe, *words)
    assert isinstance(error, RecipeError)
    assert "no data of devices of the platform" in error.what


def test_without_lengths_there_is_nothing_to_ask(recipe: Path) -> None:
    done = CliRunner().invoke(app, ["plan", str(recipe), "--aisimulate", "h200_sxm"])
    assert isinstance(done.exception, RecipeError)
    assert "--prompt-tokens and --output-tokens" in str(done.exception.todo)


def test_without_it_the_error_names_a_way(recipe: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    error = refused(recipe)
    assert isinstance(error, PreflightError)
    assert "--prefill-rate and --decode-rate" in str(error.todo)


def test_its_own_words_are_the_evidence(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, monkeypatch, {"prefill": "no timing data", "decode": ""}, code=1)
    error = refused(recipe)
    assert "no estimate of prefill" in error.what
    assert json.loads(error.evidence[0])["engine"]["hardware"] == "h200_sxm"


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "no json",
        '{"completed_requests": 3}',
        '{"completed_requests": 1, "input_throughput_tok_s": 1e999, "output_throughput_tok_s": 5}',
        '{"completed_requests": 1, "input_throughput_tok_s": 1, "output_throughput_tok_s": -5}',
    ],
)
def test_another_version_is_refused(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    installed(tmp_path, monkeypatch, {"prefill": answer, "decode": answer})
    assert "cannot be read" in refused(recipe).what


def test_nothing_completed_has_no_rate(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, monkeypatch, {"prefill": summary(0, 0, completed=0), "decode": summary(1, 1)})
    assert "completes no request" in refused(recipe).what
