"""`pdserve plan`: what it prints, as lines and as JSON, its exit codes, and where the model is looked for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pdserve.bench.result import MODEL_FILES
from pdserve.cli.commands import app
from pdserve.errors import PreflightError
from pdserve.operations.plan_recipe import load, plan_for
from pdserve.operations.size import find_crossings, planned_numbers
from tests.fakes.hub import FILES, Hub
from tests.models.test_files import COMMIT, safetensors, tensor
from tests.sizing.kit import CONFIG, HYBRID
from tests.tables import each_row

RECIPE = """\
schema: 1
name: tiny
platform: cpu
status: tested
model: {MODEL}
engine: {env: {VLLM_CPU_KVCACHE_SPACE: 1}}
prefill: {connector: {kind: mooncake, protocol: tcp}}
decode: {connector: {kind: mooncake, protocol: tcp}}
"""


def with_recipe(folder: Path, model: str) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(RECIPE.replace("{MODEL}", f"{{{model}, served_name: tiny}}"))
    return path


def with_model(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    safetensors(folder / "model.safetensors", {"model.embed_tokens.weight": tensor(1024, 512)})
    return folder


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    with_model(tmp_path / "model", CONFIG)
    return with_recipe(tmp_path, "path: model")


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe with a model of the hub, which has been fetched here."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--org--name"
    with_model(repository / "snapshots" / COMMIT, HYBRID)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return with_recipe(tmp_path, "id: org/name")


def test_lines(recipe: Path) -> None:
    done = CliRunner().invoke(app, ["plan", str(recipe), "--prompt-tokens", "1000", "--link", "10", "--disk", "2"])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert "prefill: weights of a rank: 1 MiB" in lines
    assert "prefill: KV groups: 4 x full (block 128, page 128 KiB)" in lines
    assert "prefill: blocks of a rank: 2048" in lines
    assert "prefill: requests of 4096 tokens: 64.00 at once in an instance" in lines
    assert "transfer: KV of 1000 tokens: 4 MiB" in lines
    assert lines[-1] == "no edge is crossed"


def test_weights_of_which_a_shard_is_missing_are_not_counted(recipe: Path) -> None:
    model = recipe.parent / "model"
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    done = CliRunner().invoke(app, ["plan", str(recipe)])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert "tiny: weights: not counted: this machine lacks model-00002-of-00002.safetensors" in lines
    assert "prefill: weights of a rank: not known" in lines


def test_json(recipe: Path) -> None:
    done = CliRunner().invoke(app, ["plan", str(recipe), "--json"])
    sizing = json.loads(done.stdout)
    assert [role["role"] for role in sizing["roles"]] == ["prefill", "decode"]
    assert sizing["roles"][0]["blocks"] == {"low": 2048, "high": 2048}
    assert sizing["transfer"] is None


def test_an_error_names_line_number_and_fix(recipe: Path) -> None:
    done = CliRunner().invoke(app, ["plan", str(recipe), "--set", "engine.args.max-model-len=300000"])
    assert done.exit_code == 2
    assert "needs 2344 blocks, and a rank of prefill can use 2047" in done.stdout
    assert "what to do: lower max-model-len of every role to 262016 or less (engine.args.max-model-len)" in done.stdout


def test_a_model_of_the_hub_is_read_in_its_cache(cached: Path) -> None:
    done = CliRunner().invoke(app, ["plan", str(cached)])
    assert done.exit_code == 0, done.output
    assert "2 x recurrent" in done.stdout


@each_row("chunk, advised", [(256, None), (384, 256)])
def test_validate_names_the_block_that_the_cached_model_gets(cached: Path, chunk: int, advised: int | None) -> None:
    """Recurrent state, which a recipe with an id alone does not show, makes vLLM's block larger: here 256 tokens."""
    both = "prefill.connector={kind: multi, of: [{kind: lmcache-mp}, {kind: mooncake, protocol: tcp}]}"
    section = f"lmcache={{l1_size_gb: 1, transfer_mode: lmcache_driven, chunk_size: {chunk}}}"
    planned = plan_for(load(cached, [section, both], []), None, run_dir="R", run_id="r")
    enlarged = [text for text in planned.plan.warnings if "enlarges the block of this model" in text]
    assert bool(enlarged) == (advised is not None)
    assert all("to 256 tokens" in text and text.endswith(f"chunk_size: {advised}") for text in enlarged)


def test_preflight_shows_the_same_edges(recipe: Path) -> None:
    planned = plan_for(load(recipe, ["engine.args.max-model-len=300000"], []), None, run_dir="R", run_id="r")
    findings = find_crossings(planned)
    assert [(finding.check, finding.status, finding.where) for finding in findings] == [
        ("sizes", "failed", "engine.args.max-model-len"),
        ("sizes", "failed", "engine.args.max-model-len"),
    ]
    assert "needs 2344 blocks" in findings[0].value
    assert find_crossings(plan_for(load(recipe, [], []), None, run_dir="R", run_id="r")) == []


def test_a_report_has_the_numbers_that_the_command_prints(recipe: Path) -> None:
    printed = CliRunner().invoke(app, ["plan", str(recipe)]).stdout.splitlines()
    numbers = planned_numbers(recipe)
    assert re.fullmatch(r"[0-9a-f]{12} \(\d+ files of weights, \d+ bytes\)", numbers.pop(MODEL_FILES))
    assert {f"{name}: {value}" for name, value in numbers.items()} <= set(printed)
    assert {"prefill: blocks of a rank", "decode: blocks of a rank"} <= numbers.keys()


def test_the_hub_is_asked_only_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"config.json": json.dumps(HYBRID).encode(), "hf_quant_config.json": b"{}"}
    for name, content in asked.items():
        monkeypatch.setitem(FILES, name, content)
    recipe = with_recipe(tmp_path, f"id: org/name, revision: '{COMMIT}'")
    with Hub("org/name") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        assert CliRunner().invoke(app, ["validate", str(recipe)]).exit_code == 0
        assert isinstance(CliRunner().invoke(app, ["plan", str(recipe)]).exception, PreflightError)
        assert not hub.served
        assert CliRunner().invoke(app, ["validate", str(recipe), "--online"]).exit_code == 0
        done = CliRunner().invoke(app, ["plan", str(recipe), "--online"])
        assert done.exit_code == 0, done.output
        assert "prefill: weights of a rank: not known" in done.stdout
        assert "2 x recurrent" in done.stdout
        assert hub.served == [*asked] * 2
